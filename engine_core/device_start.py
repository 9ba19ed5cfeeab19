"""From a loaded decoder on a card to what runs its steps: measure, size the KV pool, allocate, capture.

All on the engine's thread. The CPU's counterpart is in engine.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from engine_core.config import EngineConfig
from engine_core.errors import CapacityError, ConfigError
from engine_core.memory import DeviceUse, KVBudget, size_device_pool
from engine_core.model.arch import ArchSpec
from engine_core.model.decoder import Decoder, LanguageModel
from engine_core.model.device_runner import build_device_runner
from engine_core.model.device_sampler import NUM_COLUMNS, Draw, greedy_record
from engine_core.model.device_work import DeviceWork
from engine_core.model.largest_step import build_largest_step
from engine_core.model.step_memory import count_table_bytes, estimate_graph_bytes, estimate_step_bytes
from engine_core.step_executor import OverlappedExecutor, StepExecutor
from kernels.backend import DeviceBackend, KVPool
from kernels.flashinfer_support import why_no_kernels

logger = logging.getLogger(__name__)

_GIB = 2**30
LOADED = 0.98  # of a start's progress; the rest is what comes after the weights


@contextmanager
def _explaining_missing_kernels() -> Iterator[None]:
    """Tell of kernels that are neither there nor can be compiled: every start with these settings would miss them."""
    try:
        yield
    except (RuntimeError, OSError) as error:
        if not (reason := why_no_kernels(error)):
            raise
        logger.error("FlashInfer has no kernels: %s", error)  # with the compiler's output, if there is any
        raise ConfigError(
            f"FlashInfer has no kernels for this model: {reason}. Compile them before (deploy/README.md, On a GPU), or "
            "use --backend cpu"
        ) from error


def size_pool(model: LanguageModel, backend: DeviceBackend, config: EngineConfig) -> KVBudget:
    """Return the KV pool that fits beside the loaded model; arguments and errors as for the two that it is made of."""
    assert isinstance(model, Decoder), "a device computes layer by layer"
    assert config.model.max_model_len is not None, "resolve() settles it"
    return size_device_pool(
        config.cache,
        block_bytes=model.kv_page_bytes(config.cache.block_size),
        max_model_len=config.model.max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        use=measure_use(model, backend, config),
    )


@_explaining_missing_kernels()
def start_runner(
    model: LanguageModel,
    kv: KVPool,
    backend: DeviceBackend,
    config: EngineConfig,
    *,
    max_model_len: int,
    num_token_ids: int | None,
    on_progress: Callable[[float, str], None],
) -> StepExecutor:
    """Capture the graphs and return what runs steps.

    Args:
        model: Loaded.
        kv: Its pages.
        backend: What computes it.
        config: Settled.
        max_model_len: Effective context in tokens.
        num_token_ids: Ids that may be sampled; None = all.
        on_progress: Called with the share of the whole start that is done, and what is being done.

    Raises:
        ConfigError: There are no compiled kernels for the model.
    """
    assert isinstance(model, Decoder), "a device computes layer by layer"
    free_before = backend.accelerator.memory().free
    runner = build_device_runner(
        decoder=model,
        kv=kv,
        backend=backend,
        max_model_len=max_model_len,
        max_num_seqs=config.scheduler.max_num_seqs,
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        num_token_ids=num_token_ids,
        on_progress=lambda share, detail: on_progress(LOADED + (1.0 - LOADED) * share, detail),
        enforce_eager=config.device.enforce_eager,
    )
    logger.info(
        "Graphs and step buffers took %.2f GiB of the card, %.2f GiB were set aside for graphs",
        (free_before - backend.accelerator.memory().free) / _GIB,
        estimate_graph_bytes(model.arch, graph_sizes(backend, config)) / _GIB,
    )
    return OverlappedExecutor(runner)


@_explaining_missing_kernels()
def measure_use(decoder: Decoder, backend: DeviceBackend, config: EngineConfig) -> DeviceUse:
    """Run the largest step on a pool of its own, and return what the card's memory is spoken for.

    Args:
        decoder: Loaded.
        backend: What computes it.
        config: Settled.

    Raises:
        ConfigError: There are no compiled kernels for the model.
    """
    assert config.model.max_model_len is not None, "resolve() settles it"
    decoder.reserve_positions(config.model.max_model_len)
    step_bytes = _measure_largest_step(decoder, backend, config)
    # Again, of nothing: what torch's allocator keeps of the step goes back to the card. The kernels' code stays.
    backend.accelerator.peak_bytes(lambda: None)
    memory = backend.accelerator.memory()
    return DeviceUse(
        total_bytes=memory.total,
        taken_bytes=memory.total - memory.free,
        step_bytes=step_bytes,
        graph_bytes=estimate_graph_bytes(decoder.arch, graph_sizes(backend, config)),
    )


def _measure_largest_step(decoder: Decoder, backend: DeviceBackend, config: EngineConfig) -> int:
    """Return the bytes that it holds at once beside its pool, which is gone afterwards."""
    page_size, device = config.cache.block_size, backend.accelerator.device
    meta, longest = (
        build_largest_step(
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            max_num_seqs=max_num_seqs,
            max_model_len=config.model.max_model_len or 1,
            page_size=page_size,
        )
        for max_num_seqs in (config.scheduler.max_num_seqs, 1)
    )
    kv = decoder.alloc_kv(num_pages=1 + len(meta.kv_indices), page_size=page_size)
    work = DeviceWork(
        decoder=decoder,
        kv=kv,
        device=device,
        max_num_seqs=meta.num_reqs,
        max_num_rows=meta.num_reqs,
        num_token_ids=decoder.arch.vocab_size,
    )
    words = torch.frombuffer(bytearray(greedy_record(work.unread_slot) * meta.num_reqs), dtype=torch.int32)
    records = words.view(meta.num_reqs, NUM_COLUMNS).to(device)

    @torch.inference_mode()
    def run() -> None:
        # A long prompt may take other kernels than many short ones do. Where they are not compiled yet they are now,
        # which takes minutes, and not under the first request that needs them.
        decoder.forward(longest, kv)
        hidden = decoder.forward(meta, kv)
        for draw in Draw:  # each takes its memory, whatever a row's record says
            work.head(hidden, records, draw)

    return backend.accelerator.peak_bytes(run)


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
