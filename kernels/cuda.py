"""The accelerator over torch.cuda. Importing this touches no card; making one does.

All work goes to one stream of our own, since the default stream cannot be captured; results come back on a second one.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from kernels.accelerator import DeviceMemory, Event, Graph

_MIN_CAPABILITY = (8, 0)  # bf16 in tensor cores


class NoDeviceError(ValueError):
    """There is no CUDA device that can be used; the message says what to change."""


class CudaAccelerator:
    """A CUDA device; see kernels.accelerator.Accelerator.

    It may be made on any thread. The first call on a thread, of any method that queues, makes its stream and its device
    that thread's own: from then on torch's operations go there too.

    Args:
        index: Which of the visible devices.
        torch_cuda: Stands in for torch.cuda.

    Attributes:
        name: Of the card.
        device: ``cuda:index``.
        capability: CUDA's compute capability.

    Raises:
        NoDeviceError: It cannot be used.
    """

    def __init__(self, index: int = 0, torch_cuda: Any = None) -> None:
        self._cuda = torch.cuda if torch_cuda is None else torch_cuda
        _start_cuda(self._cuda)
        _check_device(self._cuda, index)
        self.name: str = self._cuda.get_device_name(index)
        self.device = torch.device("cuda", index)
        self.capability: tuple[int, int] = self._cuda.get_device_capability(index)
        self._compute = self._cuda.Stream(device=index)
        self._side = self._cuda.Stream(device=index)
        self._thread = threading.local()
        self._graph_pool: Any = None  # of all graphs: they replay one at a time, so their scratch memory may overlap

    def pinned(self, num_words: int) -> torch.Tensor:
        """Return page-locked host memory, [num_words] int32, zeroed."""
        self._enter()
        return torch.zeros(num_words, dtype=torch.int32, pin_memory=True)

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> Event:
        """Queue a copy from pinned to device memory on the compute stream."""
        self._enter()
        _copy(source, target)
        return _record(self._compute)

    def download(self, source: torch.Tensor, target: torch.Tensor) -> Event:
        """Queue a copy from device to pinned memory on the side stream, after what the compute stream has so far."""
        self._enter()
        self._side.wait_event(_record(self._compute))
        with self._cuda.stream(self._side):
            _copy(source, target)
        return _DownloadEvent(_record(self._side), source)

    def event(self) -> Event:
        """Record an event on the compute stream."""
        self._enter()
        return _record(self._compute)

    def capture(self, body: Callable[[], None]) -> Graph:
        """Capture what ``body`` queues. All graphs share one pool of memory: capture the largest first."""
        self._enter()
        if self._graph_pool is None:
            self._graph_pool = self._cuda.graph_pool_handle()
        graph = self._cuda.CUDAGraph()
        # thread_local: what other threads ask of CUDA meanwhile is none of the graph's business.
        with (
            _no_collection(),
            self._cuda.graph(graph, pool=self._graph_pool, stream=self._compute, capture_error_mode="thread_local"),
        ):
            body()
        return _CudaGraph(self._enter, graph)

    def synchronize(self) -> None:
        """Wait for all queued work, on both streams."""
        self._enter()
        self._cuda.synchronize(self.device)

    def memory(self) -> DeviceMemory:
        """Return what the driver says. What torch keeps for later counts as taken: peak_bytes() gives that back."""
        return DeviceMemory(*self._cuda.mem_get_info(self.device))

    def peak_bytes(self, body: Callable[[], None]) -> int:
        """Run ``body`` to its end and return how many bytes torch's allocator held at once beyond those held before."""
        self.synchronize()
        self._cuda.empty_cache()
        before: int = self._cuda.memory_allocated(self.device)
        self._cuda.reset_peak_memory_stats(self.device)
        body()
        self.synchronize()
        peak: int = self._cuda.max_memory_allocated(self.device)
        self._cuda.empty_cache()
        return peak - before

    def _enter(self) -> None:
        """Make device and stream this thread's own, once: torch keeps the current ones by thread."""
        if hasattr(self._thread, "has_entered"):
            return
        self._cuda.set_device(self.device)
        # Our streams do not wait for the default one, where this thread may have queued copies of weights.
        self._cuda.synchronize(self.device)
        self._cuda.set_stream(self._compute)
        self._thread.has_entered = True


class _DownloadEvent:
    """Keeps the source until the copy has read it: torch would give its memory away by the compute stream's order."""

    def __init__(self, event: Any, source: torch.Tensor) -> None:
        self._event = event
        self._source: torch.Tensor | None = source

    def synchronize(self) -> None:
        self._event.synchronize()
        self._source = None


class _CudaGraph:
    """Replays on the compute stream, whatever thread asks."""

    def __init__(self, enter: Callable[[], None], graph: Any) -> None:
        self._enter = enter
        self._graph = graph

    def replay(self) -> None:
        self._enter()
        self._graph.replay()


def _record(stream: Any) -> Event:
    event: Event = stream.record_event()  # without timing, as torch makes them: cheaper to record and to wait for
    return event


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    """Queue one transfer on the current stream. Other shapes or dtypes would need a kernel, or the host, between."""
    assert source.shape == target.shape and source.dtype == target.dtype
    assert source.is_contiguous() and target.is_contiguous()
    with torch.inference_mode():  # either side may have been made in it
        target.copy_(source, non_blocking=True)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Keep the garbage collector away: it might free a graph, an event or pinned memory, and spoil a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _start_cuda(torch_cuda: Any) -> None:
    """Start CUDA, or say why it does not start."""
    if torch.version.hip is not None:
        raise NoDeviceError(f"torch {torch.__version__} was built for ROCm: install a build of torch for CUDA")
    try:
        torch_cuda.init()
    except (RuntimeError, AssertionError, torch.cuda.DeferredCudaCallError) as error:
        raise NoDeviceError(_explain(str(error))) from error


def _explain(reason: str) -> str:
    first_line = reason.strip().splitlines()[0] if reason.strip() else "no reason given"
    if "not compiled with CUDA" in reason:
        return f"torch {torch.__version__} was built without CUDA: install a build of torch for CUDA"
    if "driver on your system is too old" in reason:
        return (
            f"the NVIDIA driver is too old for torch {torch.__version__}, built for CUDA {torch.version.cuda}: update "
            f"the driver, or install torch for an older CUDA ({first_line})"
        )
    if "no NVIDIA driver" in reason:
        return f"there is no NVIDIA driver: install it, and give a container the GPU (--gpus all) ({first_line})"
    if "No CUDA GPUs" in reason:
        return "CUDA sees no GPU: check nvidia-smi, and CUDA_VISIBLE_DEVICES if it is set"
    return f"CUDA does not start: {first_line}"


def _check_device(torch_cuda: Any, index: int) -> None:
    count = torch_cuda.device_count()
    if not 0 <= index < count:
        raise NoDeviceError(f"there is no GPU {index}: CUDA sees {count}, counted from 0")
    capability = torch_cuda.get_device_capability(index)
    if capability < _MIN_CAPABILITY:
        name, (major, minor) = torch_cuda.get_device_name(index), capability
        raise NoDeviceError(
            f"GPU {index} ({name}) has compute capability {major}.{minor}; 8.0 (Ampere) or newer is needed: choose "
            "another one with CUDA_VISIBLE_DEVICES"
        )
