"""The engine: token ids in, token ids out, in one thread of its own. These are its public names.

The Engine itself stands in engine_core.engine, apart, so that these cost no import of torch.
"""

from engine_core.config import (
    POLICIES,
    PRIORITY_ORDERS,
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
from engine_core.stats import SchedulerStats

__all__ = [
    "POLICIES",
    "PRIORITY_ORDERS",
    "AbortRequest",
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
    "EngineState",
    "FinishReason",
    "ModelConfig",
    "SamplingParams",
    "SchedulerConfig",
    "SchedulerStats",
    "TokenLogprobs",
]
