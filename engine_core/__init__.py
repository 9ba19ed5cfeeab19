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
from engine_core.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineDeadError,
    EngineError,
    EngineFailure,
)
from engine_core.memory import CgroupMemory, available_bytes, read_cgroup_memory
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
from engine_core.snapshot import CACHED, FREE, SHARED, BlockMap, EngineSnapshot, RequestSnapshot
from engine_core.stats import SchedulerStats
from engine_core.survey import CudaCard, CudaSurvey, MachineSurvey, survey_cuda, survey_machine
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
    "CgroupMemory",
    "CheckpointError",
    "ConfigError",
    "CudaCard",
    "CudaSurvey",
    "DeviceConfig",
    "EngineCommand",
    "EngineConfig",
    "EngineCoreOutput",
    "EngineCoreOutputs",
    "EngineCoreRequest",
    "EngineDeadError",
    "EngineError",
    "EngineFailure",
    "EnginePhase",
    "EngineSnapshot",
    "EngineState",
    "FinishReason",
    "MachineSurvey",
    "ModelConfig",
    "RequestSnapshot",
    "ResetPrefixCache",
    "SamplingParams",
    "SchedulerConfig",
    "SchedulerStats",
    "SetLimits",
    "TokenLogprobs",
    "available_bytes",
    "default_cache_dir",
    "read_cgroup_memory",
    "survey_cuda",
    "survey_machine",
]
