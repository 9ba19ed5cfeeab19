"""From a loaded decoder on a card to what runs its steps: measure, size the KV pool, allocate, capture.

All on the engine's thread. The CPU's counterpart is in engine.py.
"""

from __future__ import annotations

from engine_core.config import EngineConfig
from engine_core.errors import CapacityError
from engine_core.memory import DeviceUse
from engine_core.model.arch import ArchSpec
from engine_core.model.decoder import Decoder
from engine_core.model.largest_step import build_largest_step
from engine_core.model.step_memory import count_table_bytes, estimate_graph_bytes, estimate_step_bytes
from kernels.backend import DeviceBackend

_GIB = 2**30


def measure_use(decoder: Decoder, backend: DeviceBackend, config: EngineConfig) -> DeviceUse:
    """Run the largest step on a pool of its own, and return what the card's memory is spoken for.

    Args:
        decoder: Loaded.
        backend: What computes it.
        config: Settled.
    """
    assert config.model.max_model_len is not None, "resolve() settles it"
    decoder.reserve_positions(config.model.max_model_len)
    meta = build_largest_step(
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_model_len=config.model.max_model_len,
        page_size=config.cache.block_size,
    )
    memory = backend.accelerator.memory()
    kv = decoder.alloc_kv(num_pages=1 + len(meta.kv_indices), page_size=config.cache.block_size)

    def run() -> None:
        for _ in decoder.iter_logits(decoder.forward(meta, kv)):
            pass

    return DeviceUse(
        total_bytes=memory.total,
        taken_bytes=memory.total - memory.free,
        # The first step ever: what it leaves behind, such as the libraries' workspaces, counts with it.
        step_bytes=backend.accelerator.peak_bytes(run),
        graph_bytes=estimate_graph_bytes(decoder.arch, graph_sizes(backend, config)),
    )


def foretell_use(arch: ArchSpec, weights_bytes: int, backend: DeviceBackend, config: EngineConfig) -> DeviceUse:
    """Return what measure_use() will find, before anything is loaded.

    Args:
        arch: The model.
        weights_bytes: Its weights.
        backend: What will compute it.
        config: Settled.
    """
    assert config.model.max_model_len is not None, "resolve() settles it"
    sched, memory = config.scheduler, backend.accelerator.memory()
    num_tokens = min(sched.max_num_batched_tokens, sched.max_num_seqs * config.model.max_model_len)
    return DeviceUse(
        total_bytes=memory.total,
        taken_bytes=memory.total - memory.free + weights_bytes + count_table_bytes(arch, config.model.max_model_len),
        step_bytes=estimate_step_bytes(arch, num_tokens=num_tokens, num_rows=min(sched.max_num_seqs, num_tokens)),
        graph_bytes=estimate_graph_bytes(arch, graph_sizes(backend, config)),
    )


def check_weights_fit(weights_bytes: int, backend: DeviceBackend, config: EngineConfig) -> None:
    """Raise CapacityError where the weights alone are more than may be taken; arguments as for foretell_use()."""
    memory, share = backend.accelerator.memory(), config.cache.gpu_memory_utilization
    left = int(memory.total * share) - (memory.total - memory.free)
    if weights_bytes > left:
        raise CapacityError(
            f"the weights need {weights_bytes / _GIB:.2f} GiB but {max(left, 0) / _GIB:.2f} GiB of the card's "
            f"{memory.total / _GIB:.2f} GiB may be taken: raise --gpu-memory-utilization, stop what else is on the "
            "card, or use a smaller model"
        )


def graph_sizes(backend: DeviceBackend, config: EngineConfig) -> tuple[int, ...]:
    """Return the batch sizes that decoding is captured for; none with ``enforce_eager``."""
    return () if config.device.enforce_eager else backend.graph_sizes(config.scheduler.max_num_seqs)
