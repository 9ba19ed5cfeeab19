"""A CUDA device on the CPU, for tests: computes at once, and raises where a program would fail or race on a card."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

from kernels.accelerator import DeviceMemory
from kernels.testing.device_calls import current_watcher, is_capturing, watching
from kernels.testing.device_memory import memory_id
from kernels.testing.device_watch import MemoryWatcher, WaitGuard
from kernels.testing.host_waits import FakeCudaError
from kernels.testing.pending_copies import PendingCopies
from kernels.testing.recorded_graph import RecordedGraph, Recorder

__all__ = ["FakeAccelerator", "FakeCudaError", "FakeEvent", "FakeGraph"]

_DEFAULT_MEMORY: Final = DeviceMemory(free=1 << 30, total=1 << 30)


class FakeEvent:
    """A point in the streams; see kernels.accelerator.Event."""

    def __init__(self, accelerator: FakeAccelerator, compute_tick: int, side_tick: int) -> None:
        self._accelerator = accelerator
        self._compute_tick = compute_tick
        self._side_tick = side_tick

    def synchronize(self) -> None:
        """Have what was queued before it be done.

        Raises:
            FakeCudaError: While capturing, in no_waits(), or where memory has been written under a copy.
        """
        self._accelerator.wait("wait", self._compute_tick, self._side_tick)


class FakeGraph:
    """Recorded work; see kernels.accelerator.Graph.

    Attributes:
        num_replays: How often it has been replayed.
    """

    def __init__(self, accelerator: FakeAccelerator, recorded: RecordedGraph) -> None:
        self.num_replays = 0
        self._accelerator = accelerator
        self._recorded = recorded

    def replay(self) -> None:
        """Compute it again, on the memory that it was captured with.

        Raises:
            FakeCudaError: While capturing; or it writes what a download still reads; or what it reads has been freed.
        """
        self._accelerator.replay(self._recorded)
        self.num_replays += 1


class FakeAccelerator:
    """See kernels.accelerator.Accelerator. Device tensors are ordinary CPU tensors.

    Args:
        capability: CUDA's compute capability.
        memory: What memory() says.

    Attributes:
        name: Of the card.
        device: The CPU.
        capability: As given.
        log: What was queued and waited for, in order: pinned, upload, download, event, capture, replay, wait (for an
            event), synchronize.
    """

    def __init__(self, *, capability: tuple[int, int] = (9, 0), memory: DeviceMemory = _DEFAULT_MEMORY) -> None:
        self.name = "Fake GPU"
        self.device = torch.device("cpu")
        self.capability = capability
        self.log: list[str] = []
        self._memory = memory
        self._pinned: dict[int, torch.Tensor] = {}
        self._copies = PendingCopies()
        self._compute_tick = 0
        self._side_tick = 0
        self._guard = WaitGuard(self.is_pinned)

    # ------------------------------------------------------------------ Accelerator

    def pinned(self, num_words: int) -> torch.Tensor:
        """Return host memory, [num_words] int32, zeroed, that copies may use."""
        self._begin("pinned")
        block = torch.zeros(num_words, dtype=torch.int32)
        self._pinned[memory_id(block)] = block
        return block

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> FakeEvent:
        """Copy from pinned to device memory. The source stays in use until an event after it has been waited for."""
        self._begin("upload")
        _check_alike(source, target)
        if not self.is_pinned(source):
            raise FakeCudaError("an upload's source is not pinned: the host would wait for the copy")
        if self.is_pinned(target):
            raise FakeCudaError("an upload's target is pinned: it is no device memory")
        with _by_device():
            self._copies.upload(self._next_compute_tick(), source, target)
        return FakeEvent(self, self._compute_tick, 0)

    def download(self, source: torch.Tensor, target: torch.Tensor) -> FakeEvent:
        """Copy from device to pinned memory, which is garbage until the event; so must the source stay as it is."""
        self._begin("download")
        _check_alike(source, target)
        if not self.is_pinned(target):
            raise FakeCudaError("a download's target is not pinned: the host would wait for the copy")
        if self.is_pinned(source):
            raise FakeCudaError("a download's source is pinned: it is no device memory")
        self._side_tick += 1
        with _by_device():
            self._copies.download(self._side_tick, source, target)
        return FakeEvent(self, self._compute_tick, self._side_tick)

    def event(self) -> FakeEvent:
        """Record an event on the compute stream."""
        self._begin("event")
        return FakeEvent(self, self._next_compute_tick(), 0)

    def capture(self, body: Callable[[], None]) -> FakeGraph:
        """Record what ``body`` computes. As on a device nothing is computed: memory is as before, new memory garbage.

        Raises:
            FakeCudaError: It waits for the device, uses host memory, or queues copies or graphs.
        """
        self._begin("capture")
        recorder = Recorder(self.is_pinned)
        with recorder.recording():
            body()
        return FakeGraph(self, recorder.finish())

    def synchronize(self) -> None:
        """Have all queued work be done."""
        self.wait("synchronize", self._compute_tick, self._side_tick)

    def memory(self) -> DeviceMemory:
        """Return what was given to the constructor."""
        return self._memory

    def peak_bytes(self, body: Callable[[], None]) -> int:
        """Run ``body`` and return the most bytes of results that were alive at once."""
        self.synchronize()
        watcher = MemoryWatcher()
        with watcher.measuring():
            body()
        self.synchronize()
        return watcher.peak_bytes

    # ------------------------------------------------------------------ for tests

    def check(self) -> None:
        """Check the copies under way.

        Raises:
            FakeCudaError: Memory has been written under one.
        """
        with _by_device():
            self._copies.check()

    @contextmanager
    def no_waits(self) -> Iterator[None]:
        """Refuse to wait: for an event, or by asking a tensor that is not pinned for its values."""
        with self._guard.refusing():
            yield

    def count(self, name: str) -> int:
        """Return how often ``name`` is in the log."""
        return self.log.count(name)

    @property
    def num_pending(self) -> int:
        """Copies that nobody has waited for."""
        return len(self._copies)

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in memory from pinned()."""
        return memory_id(tensor) in self._pinned

    # ------------------------------------------------------------------ for events and graphs

    def wait(self, name: str, compute_tick: int, side_tick: int) -> None:
        """Bring the streams to these places."""
        if current_watcher() is self._guard:
            raise FakeCudaError(f"{name}: the host waits for the device, where nobody may")
        self._begin(name)
        with _by_device():
            self._copies.finish(compute_tick, side_tick)

    def replay(self, recorded: RecordedGraph) -> None:
        """Compute recorded work."""
        self._begin("replay")
        if any(recorded.writes(span) for span in self._copies.sources()):
            raise FakeCudaError(
                "a graph writes memory that a download still reads: wait for its event, or download from a copy"
            )
        self._next_compute_tick()
        recorded.run()

    def _begin(self, name: str) -> None:
        if is_capturing():
            raise FakeCudaError(f"{name} inside a capture: a graph holds kernels only")
        self.check()
        self.log.append(name)

    def _next_compute_tick(self) -> int:
        self._compute_tick += 1
        return self._compute_tick


@contextmanager
def _by_device() -> Iterator[None]:
    """Do what the device would do: nobody watches, and tensors of inference mode may be written."""
    with watching(None), torch.inference_mode():
        yield


def _check_alike(source: torch.Tensor, target: torch.Tensor) -> None:
    if source.shape != target.shape or source.dtype != target.dtype:
        raise FakeCudaError(
            f"no plain copy: from {list(source.shape)} {source.dtype} to {list(target.shape)} {target.dtype}"
        )
    if not source.is_contiguous() or not target.is_contiguous():
        raise FakeCudaError("a copy of memory with gaps is not one transfer")
