"""The last steps and the last two minutes, for the status page's charts. Bounded, and fed once a step.

Told the same records as the metrics, so that the two agree.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine_core import SchedulerStats
from server.records import StepRecord

MAX_STEPS = 60
MAX_SECONDS = 120


class StepFigures(NamedTuple):
    """One step of the engine.

    Attributes:
        num_prompt_tokens: Computed of prompts.
        num_generation_tokens: Sampled.
        step_time_s: From deciding it to having its results.
    """

    num_prompt_tokens: int
    num_generation_tokens: int
    step_time_s: float


@dataclass(slots=True)
class Durations:
    """How long something took, of many times."""

    count: int = 0
    sum_s: float = 0.0
    max_s: float = 0.0

    def add(self, seconds: Sequence[float]) -> None:
        """Add some more times; in C, as there is one a token."""
        if seconds:
            self.count += len(seconds)
            self.sum_s += sum(seconds)
            self.max_s = max(self.max_s, *seconds)

    def merge(self, other: Durations) -> None:
        """Add all that another one holds."""
        self.count += other.count
        self.sum_s += other.sum_s
        self.max_s = max(self.max_s, other.max_s)

    @property
    def mean_s(self) -> float | None:
        """None of nothing."""
        return self.sum_s / self.count if self.count else None


@dataclass(slots=True)
class SecondFigures:
    """What came within one second of the clock.

    Attributes:
        second: Which.
        num_prompt_tokens: Computed of prompts.
        num_generation_tokens: That clients got.
        num_prefix_queries: Prompt tokens looked up in the prefix cache.
        num_prefix_hits: Of those, found.
        num_running: At its end, as all gauges here.
        num_waiting: Likewise.
        kv_usage: Share of the KV blocks that have an owner, likewise.
        first_token: From arrival to first token, of requests that got it now.
        token_gap: Between a request's tokens.
    """

    second: int
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_running: int = 0
    num_waiting: int = 0
    kv_usage: float = 0.0
    first_token: Durations = field(default_factory=Durations)
    token_gap: Durations = field(default_factory=Durations)


class StatusHistory:
    """Remembers MAX_STEPS steps and MAX_SECONDS seconds.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._steps: deque[StepFigures] = deque(maxlen=MAX_STEPS)
        self._seconds: deque[SecondFigures] = deque(maxlen=MAX_SECONDS + 1)

    def record_step(self, record: StepRecord, stats: SchedulerStats | None) -> None:
        """Add one step; arguments as for ServerMetrics."""
        figures = self._get_present()
        if stats is not None:
            self._add_stats(figures, stats)
        figures.num_generation_tokens += record.num_generation_tokens
        figures.token_gap.add(record.token_gap_s)
        figures.first_token.add(
            [each.first_token_time - each.arrival_time for each in record.started if each.first_token_time is not None]
        )

    def list_steps(self) -> list[StepFigures]:
        """Return the last steps, the latest last."""
        return list(self._steps)

    def list_seconds(self) -> list[SecondFigures]:
        """Return the last MAX_SECONDS seconds that are over, one by one, also those in which nothing came."""
        now = int(self._clock())
        known, found = {each.second: each for each in self._seconds}, []
        last = next((each for each in reversed(self._seconds) if each.second < now - MAX_SECONDS), None)
        for second in range(now - MAX_SECONDS, now):
            last = known.get(second) or _go_on(last, second)
            found.append(last)
        return found

    def _add_stats(self, figures: SecondFigures, stats: SchedulerStats) -> None:
        figures.num_running, figures.num_waiting = stats.num_running, stats.num_waiting
        figures.kv_usage = stats.kv_cache_usage
        figures.num_prefix_queries += stats.num_prefix_queries
        figures.num_prefix_hits += stats.num_prefix_hits
        if stats.num_steps:
            num_prompt_tokens = stats.num_step_prompt_tokens
            figures.num_prompt_tokens += num_prompt_tokens
            self._steps.append(StepFigures(num_prompt_tokens, stats.num_step_generation_tokens, stats.step_time_s))

    def _get_present(self) -> SecondFigures:
        second, last = int(self._clock()), self._seconds[-1] if self._seconds else None
        if last is None or last.second != second:
            last = _go_on(last, second)
            self._seconds.append(last)
        return last


def _go_on(last: SecondFigures | None, second: int) -> SecondFigures:
    """Return a second in which nothing has come yet: what was so before it is so still."""
    if last is None:
        return SecondFigures(second)
    return SecondFigures(second, num_running=last.num_running, num_waiting=last.num_waiting, kv_usage=last.kv_usage)
