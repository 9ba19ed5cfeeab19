"""What a stage of tests/bench/gpu.py runs on: a card with FlashInfer, or the fakes; and how it times work there."""

from __future__ import annotations

import importlib
import itertools
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine_core.model.compute import Machine
from engine_core.survey import CudaCard, CudaSurvey, survey_cuda
from kernels.accelerator import Accelerator, Graph
from kernels.backend import AttnSpec, Backend, BackendOptions, DeviceBackend, StepMeta, create_backend
from tests.bench.gpu_report import Sink, find_figure, read_lines

# About what an H200 comes to. Used only where the stage `card` was left out.
_USUAL_BANDWIDTH = 4.3e12
_USUAL_GEMM_RATE = 0.79e15
BANDWIDTH, GEMM_RATE, LAUNCH = "memory bandwidth", "GEMM rate, bf16", "a kernel in a graph"
# So many bytes go through no cache of a card's.
COLD_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Bench:
    """A stage's surroundings.

    Attributes:
        sink: Takes what is found.
        is_dry: On the fakes: shapes are tiny, and times mean nothing.
        accelerator: The device.
        flashinfer: The library, or its fake.
    """

    sink: Sink
    is_dry: bool
    accelerator: Accelerator
    flashinfer: Any

    @classmethod
    def create(cls, sink: Sink, *, is_dry: bool) -> Bench:
        """Open the card, or the fakes."""
        accelerator = _create_accelerator(is_dry=is_dry)
        accelerator.synchronize()  # from here on this thread's work goes to its stream, and nothing to another one
        return cls(sink, is_dry, accelerator, load_flashinfer(accelerator, is_dry=is_dry))

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    def create_backend(self) -> DeviceBackend:
        """Create a backend of its own: workspaces, wrappers and all."""
        return build_backend(self.flashinfer, self.accelerator)

    # ------------------------------------------------------------------ sizes
    def pick(self, real: Any, dry: Any) -> Any:
        """Return what suits the device."""
        return dry if self.is_dry else real

    # ------------------------------------------------------------------ the card's own rates
    @property
    def bandwidth(self) -> float:
        """Bytes a second that its memory gives."""
        return self._rate(BANDWIDTH, 1e12, _USUAL_BANDWIDTH)

    @property
    def gemm_rate(self) -> float:
        """Operations a second that it multiplies with, in bf16."""
        return self._rate(GEMM_RATE, 1e12, _USUAL_GEMM_RATE)

    def _rate(self, name: str, unit: float, usual: float) -> float:
        figure = find_figure(read_lines(self.sink.path), name)
        return figure.median * unit if figure and figure.median > 0 else usual

    # ------------------------------------------------------------------ time
    def time_host_s(self, call: Callable[[], object], n: int) -> list[float]:
        """Return how long each of ``n`` calls holds the host up; the device is idle before each."""
        call()
        times = []
        for _ in range(n):
            self.accelerator.synchronize()
            started = time.perf_counter()
            call()
            times.append(time.perf_counter() - started)
        return times

    def time_device_s(self, call: Callable[[], object], n: int, *, inner: int = 1, warm: int = 2) -> list[float]:
        """Return the device's time for each of ``n`` rounds of ``inner`` calls, divided by ``inner``."""
        for _ in range(warm):
            call()
        self.accelerator.synchronize()
        if self.is_dry:
            return [each / inner for each in self.time_host_s(lambda: [call() for _ in range(inner)], n)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(n + 1)]
        events[0].record()
        for event in events[1:]:
            for _ in range(inner):
                call()
            event.record()
        self.accelerator.synchronize()
        return [a.elapsed_time(b) / 1e3 / inner for a, b in itertools.pairwise(events)]

    def time_captured_s(self, body: Callable[[], None], n: int, *, parts: int = 1) -> list[float]:
        """Capture ``body`` in a graph and return the device's time for each of ``n`` replays, divided by ``parts``."""
        body()
        self.accelerator.synchronize()
        graph: Graph = self.accelerator.capture(body)
        return [each / parts for each in self.time_device_s(graph.replay, n)]

    def random(self, *shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> torch.Tensor:
        """Return normal numbers on the device."""
        return torch.randn(*shape, device=self.device, dtype=torch.float32).mul_(scale).to(dtype)


# ---------------------------------------------------------------------- card or fakes
def load_flashinfer(accelerator: Accelerator, *, is_dry: bool) -> Any:
    """Return the library as the backend loads it, or its fake on a fake device."""
    if is_dry:
        from kernels.testing.fake_flashinfer import FakeFlashInfer

        return FakeFlashInfer(accelerator)
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")  # as kernels.flashinfer_backend does before it imports
    return importlib.import_module("flashinfer")


def _create_accelerator(*, is_dry: bool) -> Accelerator:
    if is_dry:
        from kernels.testing.fake_cuda import FakeAccelerator

        return FakeAccelerator()
    from kernels.cuda import CudaAccelerator

    return CudaAccelerator()


def build_backend(flashinfer: Any, accelerator: Accelerator) -> DeviceBackend:
    """Put the backend together, as its factory does."""
    from kernels.flashinfer_backend import FlashInferBackend

    return FlashInferBackend(flashinfer=flashinfer, accelerator=accelerator)


# ---------------------------------------------------------------------- what the engine is told of the machine
def build_machine(
    *, is_dry: bool, wrap: Callable[[Accelerator], Accelerator] = lambda accelerator: accelerator
) -> Machine:
    """Return a machine with a card, or with the fakes for one.

    Args:
        is_dry: The fakes.
        wrap: Put around each backend's accelerator, to look at what passes through.
    """

    def create(name: str, options: BackendOptions) -> Backend:
        if name != "cuda":
            return create_backend(name, options)
        accelerator = _create_accelerator(is_dry=is_dry)
        return build_backend(load_flashinfer(accelerator, is_dry=is_dry), wrap(accelerator))

    return Machine(survey_fake if is_dry else survey_cuda, create)


def survey_fake() -> CudaSurvey:
    """Find a card where there is none."""
    return CudaSurvey("13.0", "none", (CudaCard("Fake GPU", (9, 0), 1 << 34),), "the fake")


# ---------------------------------------------------------------------- steps
def build_meta(
    lengths: list[tuple[int, int]], *, page_size: int, seed: int = 0, num_common_pages: int = 0, num_pages: int = 0
) -> StepMeta:
    """Lay out a step over pages in random order; page 0, the null page, is not used.

    Args:
        lengths: (q_len, kv_len) a request, those with one token first.
        page_size: Tokens a page.
        seed: Of the order.
        num_common_pages: All tables begin with the same so many pages.
        num_pages: In the pool; 0 = as many as are needed.
    """
    q_lens = np.array([q_len for q_len, _ in lengths], np.int32)
    kv_lens = np.array([kv_len for _, kv_len in lengths], np.int32)
    counts = -(-kv_lens // page_size)
    kv_indptr = _indptr(counts)
    num_own = int(kv_indptr[-1]) - (len(lengths) - 1) * num_common_pages
    order = np.random.default_rng(seed).permutation(max(num_own, num_pages - 1)).astype(np.int32) + 1
    tables, used = [], num_common_pages
    for count in counts.tolist():
        own = count - num_common_pages
        tables.append(np.concatenate([order[:num_common_pages], order[used : used + own]]))
        used += own
    positions = np.concatenate([np.arange(kv - q, kv, dtype=np.int32) for q, kv in lengths])
    slots = np.concatenate(
        [
            table[at // page_size] * page_size + at % page_size
            for table, (q, kv) in zip(tables, lengths, strict=True)
            for at in (np.arange(kv - q, kv, dtype=np.int32),)
        ]
    )
    qo_indptr = _indptr(q_lens)
    return StepMeta(
        num_reqs=len(lengths),
        num_tokens=int(qo_indptr[-1]),
        num_decodes=int((q_lens == 1).sum()),
        max_q_len=int(q_lens.max()),
        max_kv_len=int(kv_lens.max()),
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=np.concatenate(tables).astype(np.int32),
        last_page_len=((kv_lens - 1) % page_size + 1).astype(np.int32),
        kv_lens=kv_lens,
        token_ids=np.zeros(int(qo_indptr[-1]), np.int32),
        positions=positions,
        slot_mapping=slots.astype(np.int32),
        logit_rows=(qo_indptr[1:] - 1).astype(np.int32),
        num_common_pages=num_common_pages,
    )


def count_pages(meta: StepMeta) -> int:
    """Return the pages that a pool for a step needs, the null page among them."""
    return int(meta.kv_indices.max()) + 1


def attn_spec(num_q_heads: int, num_kv_heads: int, head_dim: int, window_left: int = -1) -> AttnSpec:
    """Return attention as most models have it."""
    return AttnSpec(num_q_heads, num_kv_heads, head_dim, head_dim**-0.5, window_left)


def _indptr(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
