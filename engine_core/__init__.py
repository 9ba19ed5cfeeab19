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
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EnginePhase,
    EngineState,
    FinishReason,
    TokenLogprobs,
)
from engine_core.sampling_params import SamplingParams
from engine_core.snapshot import CACHED, FREE, SHARED, BlockMap, EngineSnapshot, RequestSnapshot
from engine_core.stats import SchedulerStats
from kernels.cache_dir import default_cache_dir

__all__ = [
    "CACHED",
    "CPU_ISAS",
    "FREE",
    "KV_CACHE_DTYPES",
    "POLICIES",
    "PRIORITY_ORDERS",
    "QUANTIZATIONS",
    "SHARED",
    "AbortRequest",
    "BlockMap",
    "CacheConfig",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "DeviceConfig",
    "EngineConfig",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineDeadError",
    "EngineError",
    "EnginePhase",
    "EngineSnapshot",
    "EngineState",
    "FinishReason",
    "ModelConfig",
    "RequestSnapshot",
    "SamplingParams",
    "SchedulerConfig",
    "SchedulerStats",
    "TokenLogprobs",
    "default_cache_dir",
]
