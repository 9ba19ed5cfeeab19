"""The engine: token ids in, token ids out, in one thread of its own. These are its public names.

The Engine itself stands in engine_core.engine, apart, so that these cost no import of torch.
"""

from engine_core.config import (
    CPU_ISAS,
    KV_CACHE_DTYPES,
    POLICIES,
    PRIORITY_ORDERS,
    QUANTIZATIONS,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ModelConfig,
    SchedulerConfig,
)
from engine_core.errors import CapacityError, CheckpointError, ConfigError, EngineDeadError, EngineError
from engine_core.messages import (
    AbortRequest,
    EngineCommand,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EnginePhase,
    EngineState,
    FinishReason,
    ResetPrefixCache,
    SetLimits,
    TokenLogprobs,
)
from engine_core.sampling_params import SamplingParams
from engine_core.stats import SchedulerStats
from kernels.cache_dir import default_cache_dir

__all__ = [
    "CPU_ISAS",
    "KV_CACHE_DTYPES",
    "POLICIES",
    "PRIORITY_ORDERS",
    "QUANTIZATIONS",
    "AbortRequest",
    "CacheConfig",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "DeviceConfig",
    "EngineCommand",
    "EngineConfig",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineDeadError",
    "EngineError",
    "EnginePhase",
    "EngineState",
    "FinishReason",
    "ModelConfig",
    "ResetPrefixCache",
    "SamplingParams",
    "SchedulerConfig",
    "SchedulerStats",
    "SetLimits",
    "TokenLogprobs",
    "default_cache_dir",
]
