"""The seam to a device that runs beside the host: its memory, its two streams, its graphs. Imports no CUDA.

Work is queued on the compute stream in the order it is asked for. One more stream brings results back to the host
while the next step computes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch


class DeviceMemory(NamedTuple):
    """Bytes of the device: nobody's, and in all."""

    free: int
    total: int


class Event(Protocol):
    """A point in a stream."""

    def synchronize(self) -> None:
        """Wait on the host until everything queued before it has been done."""


class Graph(Protocol):
    """Captured device work. Replaying it reads and writes the memory that it was captured with."""

    def replay(self) -> None:
        """Queue it on the compute stream."""


class Accelerator(Protocol):
    """One device, used by one thread."""

    name: str  # the card's
    device: torch.device
    capability: tuple[int, int]  # CUDA's compute capability

    def pinned(self, num_words: int) -> torch.Tensor:
        """Return page-locked host memory: [num_words] int32. Whoever writes it waits first for what still reads it."""

    def upload(self, source: torch.Tensor, target: torch.Tensor) -> Event:
        """Queue a copy from pinned to device memory, of one shape, on the compute stream; the event tells its end."""

    def download(self, source: torch.Tensor, target: torch.Tensor) -> Event:
        """Queue a copy from device to pinned memory on the side stream, after what the compute stream has so far.

        The source must not be written again before the event: the compute stream does not wait for the copy.
        """

    def event(self) -> Event:
        """Record an event on the compute stream."""

    def capture(self, body: Callable[[], None]) -> Graph:
        """Capture what ``body`` queues. It must not wait for the device, and has run once before (warm)."""

    def synchronize(self) -> None:
        """Wait for all queued work."""

    def memory(self) -> DeviceMemory:
        """Return what the device says of its memory now."""

    def peak_bytes(self, body: Callable[[], None]) -> int:
        """Run ``body`` to its end and return how many bytes it held at once beyond those held before."""
