"""What loading a model will come to, said before a byte of its weights is read.

By the same code that loads: settle_compute(), the loaders over shapes alone, size_kv_pool(); on a card
size_device_pool(), with a step's memory reckoned instead of measured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from engine_core.config import EngineConfig
from engine_core.device_start import check_weights_fit, foretell_use
from engine_core.errors import CapacityError
from engine_core.memory import KVBudget, available_bytes, effective_model_len, size_device_pool, size_kv_pool
from engine_core.messages import EnginePhase, EngineState
from engine_core.model.arch import ArchSpec
from engine_core.model.checkpoint import Checkpoint
from engine_core.model.compute import THIS_MACHINE, Machine, ModelSizes, settle_compute
from kernels.backend import DeviceBackend

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Forecast:
    """What will be.

    Attributes:
        config: With everything settled, as the engine will have it.
        reason: Why torch computes layer by layer, as the end of a sentence; empty where whole-step kernels do.
        available_bytes: What is free now, before loading, where the weights go.
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


def forecast(
    config: EngineConfig, checkpoint: Checkpoint, *, available: int | None = None, machine: Machine = THIS_MACHINE
) -> Forecast:
    """Return what Engine would come to with this config and checkpoint.

    Args:
        config: Not resolved yet.
        checkpoint: Opened, or imagined.
        available: Bytes that may be taken of the host's memory; None = what may be now. A card says itself.
        machine: What to compute on.

    Raises:
        ConfigError: The config does not fit the checkpoint or this machine.
    """
    resolved = config.resolve(trained_model_len=checkpoint.arch.max_position_embeddings)
    compute = settle_compute(resolved, checkpoint.arch, machine)
    sizes = compute.measure(checkpoint)
    room: _Room = (
        _HostRoom(sizes, available_bytes() if available is None else available)
        if compute.device is None
        else _CardRoom(sizes, checkpoint.arch, compute.device)
    )
    state, problem = None, ""
    try:
        state = _ready(compute.config, sizes, room)
    except CapacityError as error:
        problem = str(error)
    return Forecast(
        config=compute.config,
        reason=compute.reason,
        available_bytes=room.available_bytes,
        weights_bytes=sizes.weights_bytes,
        block_bytes=sizes.block_bytes,
        state=state,
        longest_model_len=_longest_model_len(compute.config, checkpoint, room),
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


class _Room(Protocol):
    """The memory that weights and KV blocks would share."""

    available_bytes: int

    def check_weights(self, config: EngineConfig) -> None:
        """Raise CapacityError where the weights alone are too much."""

    def size_pool(self, config: EngineConfig) -> KVBudget:
        """Return the KV pool that a settled config would get, or raise CapacityError."""


class _HostRoom:
    def __init__(self, sizes: ModelSizes, available: int) -> None:
        self.available_bytes = available
        self._sizes = sizes

    def check_weights(self, config: EngineConfig) -> None:
        needed, available = self._sizes.weights_bytes, self.available_bytes
        if needed > available:
            raise CapacityError(
                f"the weights need {needed / _GIB:.2f} GiB but {available / _GIB:.2f} GiB are free: "
                "give it more memory, use --quantization int8 or int4, or a smaller model"
            )

    def size_pool(self, config: EngineConfig) -> KVBudget:
        return size_kv_pool(
            config.cache,
            block_bytes=self._sizes.block_bytes,
            max_model_len=_max_model_len(config),
            max_num_seqs=config.scheduler.max_num_seqs,
            available=self.available_bytes - self._sizes.weights_bytes,
        )


class _CardRoom:
    def __init__(self, sizes: ModelSizes, arch: ArchSpec, backend: DeviceBackend) -> None:
        self.available_bytes = backend.accelerator.memory().free
        self._sizes = sizes
        self._arch = arch
        self._backend = backend

    def check_weights(self, config: EngineConfig) -> None:
        check_weights_fit(self._sizes.weights_bytes, self._backend, config)

    def size_pool(self, config: EngineConfig) -> KVBudget:
        return size_device_pool(
            config.cache,
            block_bytes=self._sizes.block_bytes,
            max_model_len=_max_model_len(config),
            max_num_seqs=config.scheduler.max_num_seqs,
            use=foretell_use(self._arch, self._sizes.weights_bytes, self._backend, config),
        )


def _max_model_len(config: EngineConfig) -> int:
    assert config.model.max_model_len is not None, "resolve() settles it"
    return config.model.max_model_len


def _ready(config: EngineConfig, sizes: ModelSizes, room: _Room) -> EngineState:
    room.check_weights(config)
    budget = room.size_pool(config)
    max_model_len = effective_model_len(_max_model_len(config), budget)
    return ready_state(budget, weights_bytes=sizes.weights_bytes, max_model_len=max_model_len)


def _longest_model_len(config: EngineConfig, checkpoint: Checkpoint, room: _Room) -> int:
    """Return the trained context, or what of it a pool for one request alone would hold."""
    trained = checkpoint.arch.max_position_embeddings
    alone = replace(
        config,
        model=replace(config.model, max_model_len=trained),
        scheduler=replace(config.scheduler, max_num_seqs=1),
    )
    for cache in (config.cache, replace(config.cache, num_blocks=None, kv_cache_bytes=None)):
        try:
            room.check_weights(alone)
            return effective_model_len(trained, room.size_pool(replace(alone, cache=cache)))
        except CapacityError:
            continue
    return 0
