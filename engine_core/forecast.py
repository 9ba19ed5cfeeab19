"""What loading a model will come to, said before a byte of its weights is read.

By the same code that loads: settle_compute(), the loaders over shapes alone, size_kv_pool().
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from engine_core.config import EngineConfig
from engine_core.errors import CapacityError
from engine_core.memory import KVBudget, available_bytes, effective_model_len, size_kv_pool
from engine_core.messages import EnginePhase, EngineState
from engine_core.model.checkpoint import Checkpoint
from engine_core.model.compute import ModelSizes, settle_compute

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Forecast:
    """What will be.

    Attributes:
        config: With everything settled, as the engine will have it.
        reason: Why torch computes layer by layer, as the end of a sentence; empty where whole-step kernels do.
        available_bytes: What may still be taken now, before loading.
        weights_bytes: Memory for the weights.
        block_bytes: Memory for one KV block.
        state: The engine's once it is ready; None = it does not fit.
        longest_model_len: The longest context that one request could have here, in tokens; 0 = none.
        problem: Why it does not fit, a sentence.
    """

    config: EngineConfig
    reason: str
    available_bytes: int
    weights_bytes: int
    block_bytes: int
    state: EngineState | None
    longest_model_len: int
    problem: str


def forecast(config: EngineConfig, checkpoint: Checkpoint, *, available: int | None = None) -> Forecast:
    """Return what Engine would come to with this config and checkpoint.

    Args:
        config: Not resolved yet.
        checkpoint: Opened, or imagined.
        available: Bytes that may be taken; None = what may be now.

    Raises:
        ConfigError: The config does not fit the checkpoint or this machine.
    """
    resolved = config.resolve(trained_model_len=checkpoint.arch.max_position_embeddings)
    compute = settle_compute(resolved, checkpoint.arch)
    sizes = compute.measure(checkpoint)
    available = available_bytes() if available is None else available
    state, problem = None, ""
    try:
        state = _ready(compute.config, sizes, available)
    except CapacityError as error:
        problem = str(error)
    return Forecast(
        config=compute.config,
        reason=compute.reason,
        available_bytes=available,
        weights_bytes=sizes.weights_bytes,
        block_bytes=sizes.block_bytes,
        state=state,
        longest_model_len=_longest_model_len(compute.config, checkpoint, sizes, available),
        problem=problem,
    )


def ready_state(budget: KVBudget, *, weights_bytes: int, max_model_len: int) -> EngineState:
    """Return an engine's state once it is ready.

    Args:
        budget: Of the KV pool.
        weights_bytes: Memory that the weights take.
        max_model_len: Effective context in tokens.
    """
    return EngineState(
        phase=EnginePhase.READY,
        detail=budget.reason,
        progress=1.0,
        num_blocks=budget.num_blocks,
        block_size=budget.block_size,
        max_model_len=max_model_len,
        weights_bytes=weights_bytes,
        kv_bytes=(budget.num_blocks + 1) * budget.block_bytes,
    )


def _ready(config: EngineConfig, sizes: ModelSizes, available: int) -> EngineState:
    assert config.model.max_model_len is not None, "resolve() settles it"
    if sizes.weights_bytes > available:
        raise CapacityError(
            f"the weights need {sizes.weights_bytes / _GIB:.2f} GiB but {available / _GIB:.2f} GiB are free: "
            "give it more memory, use --quantization int8 or int4, or a smaller model"
        )
    max_model_len = config.model.max_model_len
    budget = _size_pool(config, sizes, available, max_model_len, config.scheduler.max_num_seqs)
    return ready_state(
        budget, weights_bytes=sizes.weights_bytes, max_model_len=effective_model_len(max_model_len, budget)
    )


def _size_pool(
    config: EngineConfig, sizes: ModelSizes, available: int, max_model_len: int, max_num_seqs: int
) -> KVBudget:
    return size_kv_pool(
        config.cache,
        block_bytes=sizes.block_bytes,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        available=available - sizes.weights_bytes,
    )


def _longest_model_len(config: EngineConfig, checkpoint: Checkpoint, sizes: ModelSizes, available: int) -> int:
    """Return the trained context, or what of it a pool for one request alone would hold."""
    trained = checkpoint.arch.max_position_embeddings
    if sizes.weights_bytes > available:
        return 0
    try:
        budget = _size_pool(config, sizes, available, trained, 1)
    except CapacityError:
        pool = replace(config, cache=replace(config.cache, num_blocks=None, kv_cache_bytes=None))
        try:
            budget = _size_pool(pool, sizes, available, trained, 1)
        except CapacityError:
            return 0
    return effective_model_len(trained, budget)
