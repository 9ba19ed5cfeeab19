"""What the output processor notes of a request and of a step: metrics, log and traces tell the same figures from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine_core import FinishReason, SchedulerStats
from server.gap_sample import GapSample

# A request that loses its blocks more often than this has the later times counted only.
_MAX_PREEMPTED_TIMES = 16


@dataclass(slots=True)
class RequestRecord:
    """One request's figures, from its registration to its end. Times are seconds on the engine's clock.

    Attributes:
        request_id: Whose.
        arrival_time: When it was admitted by the server.
        num_prompt_tokens: Of its prompt.
        num_cached_tokens: Of those, found in the prefix cache.
        num_output_tokens: Sampled so far and counted to the client.
        max_tokens: Output tokens that it may have at most.
        n: Choices that its client asked for; each is a request.
        choice: Which of them it is, from 0.
        key_id: Whose key it came with; empty where no key is asked for.
        first_scheduled_time: When the scheduler first admitted it; None before.
        first_token_time: When its first token was delivered; None before.
        last_token_time: When its latest token was delivered; None before.
        gaps: Times between its tokens.
        num_preemptions: Times that its blocks were taken away.
        preempted_times: When, of the first few.
        end_time: When it ended; None before.
        finish_reason: Why; None before.
    """

    request_id: str
    arrival_time: float
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    max_tokens: int = 0
    n: int = 1
    choice: int = 0
    key_id: str = ""
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    gaps: GapSample = field(default_factory=GapSample)
    num_preemptions: int = 0
    preempted_times: list[float] = field(default_factory=list)
    end_time: float | None = None
    finish_reason: FinishReason | None = None

    def note_preemption(self, time: float) -> None:
        """Note that its blocks were taken away."""
        self.num_preemptions += 1
        if len(self.preempted_times) < _MAX_PREEMPTED_TIMES:
            self.preempted_times.append(time)


@dataclass(slots=True)
class StepRecord:
    """What one step meant to its requests, as the output processor saw it.

    Attributes:
        num_generation_tokens: Tokens that came.
        started: Requests whose first token came.
        token_gap_s: Per other request with new tokens: seconds since its last ones.
        ended: Requests that ended.
    """

    num_generation_tokens: int = 0
    started: list[RequestRecord] = field(default_factory=list)
    token_gap_s: list[float] = field(default_factory=list)
    ended: list[RequestRecord] = field(default_factory=list)


class StepListener(Protocol):
    """Hears of every step."""

    def record_step(self, record: StepRecord, stats: SchedulerStats | None) -> None:
        """Take one step in.

        Args:
            record: What it meant to its requests.
            stats: The scheduler's figures after it; None where it gave none.
        """


class StepListeners:
    """Several listeners as one.

    Args:
        listeners: Told in this order.
    """

    def __init__(self, *listeners: StepListener) -> None:
        self._listeners: Sequence[StepListener] = listeners

    def record_step(self, record: StepRecord, stats: SchedulerStats | None) -> None:
        """Tell each."""
        for listener in self._listeners:
            listener.record_step(record, stats)
