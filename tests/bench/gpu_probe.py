"""What a running engine is looked at through: when the device worked, and what the host did for a step."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from kernels.accelerator import Accelerator, Graph

# Part of a step on the host -> the method that does it. `launch` is all of them together, but for `schedule`.
_PARTS = {
    "build": ("engine_core.model.input_batch", "InputBatch", "build_step"),
    "pack": ("kernels.step_block", "StepBlock", "load"),
    "plan": ("kernels.flashinfer_backend", "FlashInferBackend", "plan_step"),
    "launch": ("engine_core.model.device_runner", "DeviceRunner", "launch"),
}


@dataclass(slots=True)
class Replays:
    """When graphs ran on the device, noted while ``is_on``.

    Attributes:
        is_on: Note them.
        is_dry: The device is a fake: the host's clock must do.
        marks: (start, end) of each, events or seconds.
    """

    is_dry: bool
    is_on: bool = False
    marks: list[tuple[Any, Any]] = field(default_factory=list)

    def mark(self) -> Any:
        """Return now, on the device's clock."""
        if self.is_dry:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, start: Any, end: Any) -> float:
        """Return the time between two marks that have passed."""
        return float(end - start) if self.is_dry else float(start.elapsed_time(end)) / 1e3

    def idle_share(self) -> float:
        """Return the share of the time, from the first replay's start to the last one's, in which none ran."""
        total_s = self.seconds(self.marks[0][0], self.marks[-1][0])
        busy_s = sum(self.seconds(start, end) for start, end in self.marks[:-1])
        return max(0.0, 1.0 - busy_s / total_s)

    def busy_s(self, num_steps: int) -> list[float]:
        """Return how long the graphs of each step took, all steps having as many."""
        each = max(1, round(len(self.marks) / max(1, num_steps)))
        busy = [self.seconds(start, end) for start, end in self.marks]
        return [sum(busy[first : first + each]) for first in range(0, len(busy) - each + 1, each)]


class _WatchedGraph:
    def __init__(self, graph: Graph, replays: Replays) -> None:
        self._graph = graph
        self._replays = replays

    def replay(self) -> None:
        if not self._replays.is_on:
            self._graph.replay()
            return
        start = self._replays.mark()
        self._graph.replay()
        self._replays.marks.append((start, self._replays.mark()))


class WatchedAccelerator:
    """An accelerator whose graphs' replays are noted; all else is the accelerator's own.

    Args:
        accelerator: What works.
        replays: Where they are noted.
    """

    def __init__(self, accelerator: Accelerator, replays: Replays) -> None:
        self._accelerator = accelerator
        self._replays = replays

    def __getattr__(self, name: str) -> Any:
        return getattr(self._accelerator, name)

    def capture(self, body: Callable[[], None]) -> Graph:
        """Capture as ever; what is returned notes when it runs."""
        return _WatchedGraph(self._accelerator.capture(body), self._replays)


@dataclass(slots=True)
class HostTimes:
    """Seconds on the host, by part of a step, noted while ``is_on``."""

    is_on: bool = False
    parts: dict[str, list[float]] = field(default_factory=dict)

    def note(self, part: str, seconds: float) -> None:
        """Add a sample."""
        if self.is_on:
            self.parts.setdefault(part, []).append(seconds)


@contextmanager
def watching_host(times: HostTimes) -> Iterator[None]:
    """Have each part of a step timed, in every engine, until the end of the block."""
    restored: list[tuple[type, str, Any]] = []
    for part, (module, class_name, method) in _PARTS.items():
        owner = getattr(importlib.import_module(module), class_name)
        original = getattr(owner, method)
        restored.append((owner, method, original))
        setattr(owner, method, _timed(original, part, times))
    try:
        yield
    finally:
        for owner, method, original in restored:
            setattr(owner, method, original)


def _timed(call: Callable[..., Any], part: str, times: HostTimes) -> Callable[..., Any]:
    def timed(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return call(*args, **kwargs)
        finally:
            times.note(part, time.perf_counter() - started)

    return timed
