"""The scheduler's features, one file each. build_constraints is the only list of them."""

from engine_core.config import SchedulerConfig
from engine_core.scheduler.constraint import Constraint
from engine_core.scheduler.constraints.cascade import CommonPrefix
from engine_core.scheduler.constraints.chunking import ChunkLimit, WholePrompt
from engine_core.scheduler.constraints.delay import DelayFactor
from engine_core.scheduler.constraints.target_itl import TargetItl


def build_constraints(config: SchedulerConfig, *, block_size: int) -> list[Constraint]:
    """Return the constraints that the configuration turns on."""
    constraints: list[Constraint] = []
    limits = [limit for limit in (config.max_chunk_size, config.long_prefill_token_threshold) if limit > 0]
    if not config.enable_chunked_prefill:
        constraints.append(WholePrompt())
    elif limits:
        constraints.append(ChunkLimit(min(limits)))
    if config.delay_factor > 0.0:
        constraints.append(DelayFactor(config.delay_factor))
    if config.target_itl_ms > 0.0:
        constraints.append(TargetItl(config.target_itl_ms / 1e3))
    if config.enable_cascade_attn:
        constraints.append(CommonPrefix(block_size))
    return constraints
