"""Backlog: what has been admitted and not yet been scheduled, and how long the engine will need. Refuses nobody.

On the event loop's thread; the output processor tells it of each step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from engine_core import EngineCoreOutputs
from server.overload.drain_rate import DrainRate, compute_retry_after_s
from server.records import RequestRecord

# How much the latest answer's length counts beside those before it.
_LENGTH_WEIGHT = 0.1


class Backlog:
    """The queue as the server sees it, and the engine's pace.

    Attributes:
        num_requests: Waiting, one a choice.
        num_tokens: Their prompt tokens.
    """

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self._places: dict[str, Place] = {}
        self._rate = DrainRate()
        self._num_running = 0
        self._num_waiting = 0
        self._last_step_at = 0.0
        self._mean_output_tokens: float | None = None

    def count_free_seats(self, max_num_seqs: int) -> int:
        """Return how many of those who wait the engine will take at its next step.

        None while its last step left anybody waiting: it lacks blocks or tokens then, if not seats, and nobody is
        overtaken.

        Args:
            max_num_seqs: Its seats.
        """
        return 0 if self._num_waiting else max(0, max_num_seqs - self._num_running)

    def estimate_retry_after_s(self) -> int:
        """Return the whole seconds after which whoever is refused now should ask again."""
        num_in_hand = self.num_requests + self._num_running
        num_tokens = self.num_tokens + num_in_hand * (self._mean_output_tokens or 0.0)
        return compute_retry_after_s(num_tokens, self._rate.tokens_per_s)

    def note_step(self, outputs: EngineCoreOutputs, ended: Sequence[RequestRecord], now: float) -> None:
        """Take what the engine told after a step.

        Args:
            outputs: Its message.
            ended: Requests that ended with it.
            now: Seconds, monotonic.
        """
        for request_id in outputs.started_req_ids:
            place = self._places.pop(request_id, None)
            if place is not None:
                place.start(request_id)
        for record in ended:
            if record.first_token_time is not None:
                self._note_length(record.num_output_tokens)
        stats = outputs.stats
        if stats is None:
            return
        if stats.num_steps:
            # With steps in flight their times overlap: from one to the next is what each adds.
            is_next = self._num_running > 0
            duration_s = now - self._last_step_at if is_next else stats.step_time_s
            self._rate.add(stats.num_step_prompt_tokens + stats.num_step_generation_tokens, duration_s)
            self._last_step_at = now
        self._num_running, self._num_waiting = stats.num_running, stats.num_waiting

    def _note_length(self, num_output_tokens: int) -> None:
        mean = self._mean_output_tokens
        if mean is None:
            self._mean_output_tokens = float(num_output_tokens)
        else:
            self._mean_output_tokens = mean + _LENGTH_WEIGHT * (num_output_tokens - mean)


class Place:
    """What one client's request holds of the queue: its choices that have not been scheduled, and their prompt tokens.

    Args:
        backlog: The queue.

    Attributes:
        num_requests: Choices.
        num_tokens: Their prompt tokens.
    """

    def __init__(self, backlog: Backlog) -> None:
        self.num_requests = 0
        self.num_tokens = 0
        self._backlog = backlog
        self._waiting: dict[str, int] = {}
        self._on_start: Callable[[], None] = lambda: None

    def take(self, num_requests: int, num_tokens: int) -> None:
        """Hold more, before it is known how many tokens there are."""
        self.num_requests += num_requests
        self.num_tokens += num_tokens
        self._backlog.num_requests += num_requests
        self._backlog.num_tokens += num_tokens

    def settle(self, num_tokens_by_id: Mapping[str, int], on_start: Callable[[], None]) -> None:
        """Hold just these requests, which the engine will get, in place of what was held before.

        Args:
            num_tokens_by_id: Prompt tokens by request id.
            on_start: Called for each of them that the engine has scheduled; it is held no longer.
        """
        self.leave()
        self.take(len(num_tokens_by_id), sum(num_tokens_by_id.values()))
        self._waiting = dict(num_tokens_by_id)
        self._on_start = on_start
        self._backlog._places.update(dict.fromkeys(num_tokens_by_id, self))

    def start(self, request_id: str) -> None:
        """Hold a request no longer: the engine has scheduled it."""
        self.take(-1, -self._waiting.pop(request_id))
        self._on_start()

    def leave(self) -> None:
        """Hold nothing any more; once more does no harm."""
        for request_id in self._waiting:
            self._backlog._places.pop(request_id, None)
        self._waiting = {}
        self.take(-self.num_requests, -self.num_tokens)
