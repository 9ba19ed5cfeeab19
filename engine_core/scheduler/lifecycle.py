"""Lifecycle: every live request, where it stands, and the only code that moves it. Decides nothing.

::

    add -> WAITING -> RUNNING -> FINISHED_*
                ^        |
                |        v
                +-- PREEMPTED (parked while its last output is under way, then queued at its old rank)

Source: scheduler.md R8, 1.2, 1.8, 1.13.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Sequence

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.messages import EngineCoreOutput
from engine_core.request import FINISH_REASONS, Rank, Request, RequestStatus
from engine_core.scheduler.constraint import Constraint
from engine_core.scheduler.request_queue import RequestQueue


def _get_rank(request: Request) -> Rank:
    return request.rank


class Lifecycle:
    """Where the requests are.

    Attributes:
        requests: Every live request by id.
        waiting: Those that may be admitted.
        parked: Preempted ones whose last output is under way; they may not be admitted before it is in.
        running: Those with blocks, sorted by rank: the head is served first, the tail is preempted first.
        num_set_aside: How many the last look at the queue passed over.
    """

    def __init__(self, *, kv_cache: KVCacheManager, constraints: Sequence[Constraint]) -> None:
        self.requests: dict[str, Request] = {}
        self.waiting = RequestQueue()
        self.parked: dict[str, Request] = {}
        self.running: list[Request] = []
        self.num_set_aside = 0
        self._set_aside: list[Request] = []
        self._kv_cache = kv_cache
        self._constraints = constraints
        self._finished_req_ids: list[str] = []
        self._preempted_req_ids: list[str] = []
        self._undelivered: list[EngineCoreOutput] = []

    @property
    def has_news(self) -> bool:
        """Whether something has not been told yet, to the runner or to a client."""
        return bool(self._finished_req_ids or self._preempted_req_ids or self._undelivered)

    # -------------------------------------------------------------------- moves

    def add(self, request: Request) -> None:
        """Let a new request wait."""
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def set_head_aside(self) -> None:
        """Let the next in the queue be looked at, until ``return_set_aside``."""
        self._set_aside.append(self.waiting.pop())

    def return_set_aside(self) -> None:
        """Put back who was set aside; rank alone gives each the place it had."""
        self.num_set_aside = len(self._set_aside)
        while self._set_aside:
            self.waiting.add(self._set_aside.pop())

    def start_head(self, request: Request, now: float) -> None:
        """Move the head of the queue to its place among the running."""
        popped = self.waiting.pop()
        assert popped is request, "only the head of the queue is admitted"
        request.status = RequestStatus.RUNNING
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
        insort(self.running, request, key=_get_rank)

    def preempt_tail(self, num_steps_in_flight: int) -> Request:
        """Take the blocks of the last running request, and queue it again at its old rank.

        Nothing is saved: when it comes back, the ordinary prefix lookup finds what has survived. What steps in flight
        bring for it stays valid; until it is in, the request is parked.

        Args:
            num_steps_in_flight: Of this request.
        """
        request = self.running.pop()
        self._release(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = request.decode_until = 0
        request.num_tokens_with_spec -= len(request.draft_token_ids)
        request.draft_token_ids = []
        request.num_preemptions += 1
        request.num_steps_to_drain = num_steps_in_flight
        if num_steps_in_flight:
            self.parked[request.request_id] = request
        else:
            self.waiting.add(request)
        return request

    def drop_tail(self) -> Request:
        """Preempt the last running request, forgetting what steps in flight would bring for it."""
        request = self.preempt_tail(0)
        request.num_tokens_with_spec = request.num_tokens
        self._preempted_req_ids.append(request.request_id)
        return request

    def drain_one(self, request: Request) -> None:
        """A step in flight has brought what it had for a preempted request; after the last one it may come back."""
        request.num_steps_to_drain -= 1
        if request.num_steps_to_drain == 0 and not request.status.is_finished:
            del self.parked[request.request_id]
            self.waiting.add(request)

    def finish(
        self,
        request: Request,
        status: RequestStatus,
        token_ids: Sequence[int] = (),
        *,
        stop_token_id: int | None = None,
        error: str | None = None,
        is_suspect: bool = False,
    ) -> EngineCoreOutput:
        """End a request once and for all. A running one stays in ``running`` until the caller sweeps.

        Args:
            request: A live one.
            status: A final one.
            token_ids: Its last tokens.
            stop_token_id: The client's stop token that ended it.
            error: A sentence, with FINISHED_ERROR.
            is_suspect: Its computation failed: nobody is to find its KV.
        """
        if request.request_id in self.parked:
            del self.parked[request.request_id]
        elif request.status is not RequestStatus.RUNNING:
            self.waiting.remove(request)
        if is_suspect:
            self._kv_cache.forget_suspect(request)
        self._release(request)
        request.status = status
        del self.requests[request.request_id]
        self._finished_req_ids.append(request.request_id)
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=list(token_ids),
            finish_reason=FINISH_REASONS[status],
            stop_token_id=stop_token_id,
            num_cached_tokens=request.num_cached_tokens,
            error=error,
            first_scheduled_time=request.first_scheduled_time,
        )

    def fail_later(self, request: Request, error: str) -> None:
        """End a request from within schedule(); its client hears of it with the next results."""
        self._undelivered.append(self.finish(request, RequestStatus.FINISHED_ERROR, error=error))

    def sweep_running(self) -> None:
        """Drop the finished from ``running``: one pass, however many ended."""
        self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]

    # --------------------------------------------------------------------- news

    def take_finished_req_ids(self) -> list[str]:
        """Return and clear the ids that have ended since the last call."""
        taken, self._finished_req_ids = self._finished_req_ids, []
        return taken

    def take_preempted_req_ids(self) -> list[str]:
        """Return and clear the ids that were preempted outside schedule()."""
        taken, self._preempted_req_ids = self._preempted_req_ids, []
        return taken

    def take_undelivered(self) -> list[EngineCoreOutput]:
        """Return and clear the ends that no client has heard of."""
        taken, self._undelivered = self._undelivered, []
        return taken

    def _release(self, request: Request) -> None:
        """The only place where a request gives back what it holds."""
        self._kv_cache.free(request)
        for constraint in self._constraints:
            constraint.release(request)
