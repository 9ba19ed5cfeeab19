"""Gate: lets clients' requests in, one Permit each, and gives up those that take too long. On the event loop's thread.

Knows no HTTP: a refusal is a RequestError. The engine's side of it is the Backlog's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from types import TracebackType
from typing import Protocol

from server.engine_client import EngineClient
from server.errors import RequestError
from server.generation import GenerationRequest
from server.overload.backlog import Place
from server.overload.drain_rate import bound_retry_after_s
from server.overload.key_limits import KeyLimits
from server.overload.limits import Limits
from server.overload.refusals import (
    Refusal,
    build_abort,
    build_key_concurrency,
    build_key_rate,
    build_queue_full,
    build_queue_timeout,
    build_queue_tokens_full,
    build_request_timeout,
)
from server.principal import Principal

# Until a prompt's tokens are counted, its characters stand for them: few texts have more of them a token.
_CHARS_A_TOKEN = 16
# From its admission to the engine client a request takes a few turns of the loop; never so long.
_ON_THE_WAY_S = 0.5


class RejectionMetrics(Protocol):
    """The metrics that refusals feed."""

    def count_rejection(self, reason: str) -> None:
        """Count a request that was refused or given up for overload."""


class Gate:
    """Decides who is let in.

    Args:
        engine_client: Its backlog is what fills up, and it ends what is given up.
        limits: What the server takes on.
        metrics: Told of each refusal.
        clock: Seconds, monotonic.

    Attributes:
        limits: Those that hold now; whoever changes them puts others in their place.
        allocated: Those that the server was started with: the engine has room for no more.
        backlog: The engine client's.
        clock: As given.
    """

    def __init__(
        self,
        *,
        engine_client: EngineClient,
        limits: Limits,
        metrics: RejectionMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits = self.allocated = limits
        self.backlog = engine_client.backlog
        self.clock = clock
        self._engine_client = engine_client
        self._metrics = metrics
        self._keys = KeyLimits()
        self._permits: set[Permit] = set()
        self._aside: set[Permit] = set()

    @property
    def num_permits(self) -> int:
        """Clients' requests for the engine that have been let in and not been answered to the end."""
        return len(self._permits)

    def read_gauges(self) -> dict[str, float]:
        """Return how full the server is, as metrics."""
        return {
            "pointsman:max_num_seqs": self.limits.max_num_seqs,
            "pointsman:num_permits": self.num_permits,
            "pointsman:num_requests_queued": self.backlog.num_requests,
            "pointsman:num_tokens_queued": self.backlog.num_tokens,
        }

    def create_permit(self, principal: Principal, label: str) -> Permit:
        """Return a permit that holds nothing yet; to be closed once, however its request ends.

        Args:
            principal: Who asks.
            label: What the client calls its request.
        """
        return Permit(self, principal, label)

    def abort(self, names: Collection[str]) -> dict[str, int]:
        """End requests by the ids that clients know: their own X-Request-Id, or that of the answer.

        Returns:
            By name: how many requests it ended; a label is no key, and several may have the same.
        """
        counts = dict.fromkeys(names, 0)
        for permit in list(self._permits):
            known = [name for name in permit.names if name in counts]
            if known and permit.fail(build_abort()):
                for name in known:
                    counts[name] += 1
        return counts

    # ------------------------------------------------------------------ the permits'
    def let_in(self, permit: Permit, *, is_aside: bool) -> None:
        """Count a request in, before its body is read.

        Args:
            permit: Its.
            is_aside: It will not wait for the engine, so it may come in when the queue is full.

        Raises:
            Refusal: The queue is full, or its key has too many.
        """
        key_id, limits = permit.principal.key_id, self.limits
        if not is_aside:
            self.check_requests(1)
        if 0 < limits.max_requests_per_key <= self._keys.count_in_hand(key_id):
            raise self.refuse(build_key_concurrency(limits.max_requests_per_key, self.estimate_s()))
        per_minute = limits.max_requests_per_minute
        wait_s = self._keys.try_take(key_id, self.clock(), per_minute=per_minute)
        if wait_s:
            raise self.refuse(build_key_rate(per_minute, bound_retry_after_s(wait_s)))
        (self._aside if is_aside else self._permits).add(permit)

    def let_out(self, permit: Permit) -> None:
        """Count a request out; one that was not counted in is none."""
        if permit in self._permits or permit in self._aside:
            self._permits.discard(permit)
            self._aside.discard(permit)
            self._keys.give_back(permit.principal.key_id, per_minute=self.limits.max_requests_per_minute)

    def check_requests(self, num_requests: int) -> None:
        """Check that so many more may wait. An empty queue takes any number, or some would never be served.

        Raises:
            Refusal: They may not.
        """
        cap, num_queued = self.limits.max_queued_requests, self.backlog.num_requests
        if not cap or not num_queued:
            return
        num_seats = self.backlog.count_free_seats(self.limits.max_num_seqs)
        if num_queued + num_requests > cap + num_seats:
            raise self.refuse(build_queue_full(num_queued, cap, self.estimate_s()))

    def check_tokens(self, num_tokens: int, *, num_own: int = 0) -> None:
        """Check that so many more prompt tokens may wait; as for check_requests.

        Args:
            num_tokens: Of one client's request.
            num_own: What it holds already, which is not in its own way.

        Raises:
            Refusal: They may not.
        """
        cap, num_queued = self.limits.max_queued_tokens, self.backlog.num_tokens - num_own
        if cap and num_queued and num_queued + num_tokens > cap:
            raise self.refuse(build_queue_tokens_full(num_queued, cap, self.estimate_s()))

    def end(self, request_ids: Collection[str], error: RequestError) -> bool:
        """End requests in the engine; return whether any of them was live."""
        return bool(self._engine_client.fail_requests(request_ids, error))

    def refuse(self, refusal: Refusal) -> Refusal:
        """Count a refusal and return it."""
        self._metrics.count_rejection(refusal.reason.value)
        return refusal

    def estimate_s(self) -> int:
        """Return the seconds after which whoever is refused should ask again."""
        return self.backlog.estimate_retry_after_s()


class Permit:
    """What one client's request holds of the server, from its head to the last byte of its answer.

    A context manager: whatever becomes of the request, what it holds is given back, once.

    Args:
        gate: Gives it.
        principal: Who asks.
        label: What the client calls its request.

    Attributes:
        principal: As given.
        names: What the request can be called: its label, and once it is admitted its answer's id and its choices'.
    """

    def __init__(self, gate: Gate, principal: Principal, label: str) -> None:
        self.principal = principal
        self.names: set[str] = {label}
        self._gate = gate
        self._place = Place(gate.backlog)
        self._request_ids: tuple[str, ...] = ()
        self._let_in_at = self._admitted_at = 0.0
        self._error: RequestError | None = None
        self._queue_timer: asyncio.TimerHandle | None = None
        self._timers: list[asyncio.TimerHandle] = []

    def __enter__(self) -> Permit:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for timer in self._timers:
            timer.cancel()
        self._place.leave()
        self._gate.let_out(self)

    def enter(self) -> None:
        """Be let in, before the body is read.

        Raises:
            Refusal: The server is full, or the key has too many requests.
        """
        self._gate.let_in(self, is_aside=False)
        self._let_in_at = self._gate.clock()

    def enter_aside(self) -> None:
        """Be let in for what the engine has no part in: it counts against the key, but not against the queue.

        Raises:
            Refusal: The key has too many requests.
        """
        self._gate.let_in(self, is_aside=True)

    def reserve(self, num_requests: int, num_chars: int) -> None:
        """Take a place for all choices at once, before their prompts are tokenised.

        Args:
            num_requests: Choices.
            num_chars: Of their prompts together.

        Raises:
            Refusal: The queue has not so many places.
        """
        num_tokens = num_chars // _CHARS_A_TOKEN
        self._gate.check_requests(num_requests)
        self._gate.check_tokens(num_tokens)
        self._place.take(num_requests, num_tokens)

    def admit(self, response_id: str, requests: Sequence[GenerationRequest]) -> None:
        """Let these go to the engine; from here on their time runs out.

        Raises:
            RequestError: Their tokens do not fit into the queue, or somebody has ended the request meanwhile.
        """
        if self._error is not None:
            raise self._error
        num_tokens_by_id = {each.engine_request.request_id: each.num_prompt_tokens for each in requests}
        self._gate.check_tokens(sum(num_tokens_by_id.values()), num_own=self._place.num_tokens)
        self._place.settle(num_tokens_by_id, self._note_start)
        self._request_ids = tuple(num_tokens_by_id)
        self.names |= {response_id, *self._request_ids}
        self._admitted_at = self._gate.clock()
        limits = self._gate.limits
        if limits.queue_timeout_s:
            self._queue_timer = self._call_after(limits.queue_timeout_s, self._give_up_waiting)
        if limits.request_timeout_s:
            self._call_after(limits.request_timeout_s, self._give_up)

    def fail(self, error: RequestError) -> bool:
        """End the request with an error; return whether it had not ended already."""
        if not self._request_ids:
            self._error = error
            return True
        if self._gate.end(self._request_ids, error):
            return True
        if self._gate.clock() - self._admitted_at >= _ON_THE_WAY_S:
            return False
        self._timers.append(asyncio.get_running_loop().call_later(_ON_THE_WAY_S, self.fail, error))
        return True

    def _call_after(self, timeout_s: float, give_up: Callable[[], None]) -> asyncio.TimerHandle:
        left_s = timeout_s - (self._admitted_at - self._let_in_at)
        timer = asyncio.get_running_loop().call_later(max(0.0, left_s), give_up)
        self._timers.append(timer)
        return timer

    def _note_start(self) -> None:
        # The first of several choices is enough: somebody is being answered.
        if self._queue_timer is not None:
            self._queue_timer.cancel()

    def _give_up_waiting(self) -> None:
        gate = self._gate
        refusal = build_queue_timeout(gate.limits.queue_timeout_s, gate.estimate_s())
        if self.fail(refusal):
            gate.refuse(refusal)

    def _give_up(self) -> None:
        refusal = build_request_timeout(self._gate.limits.request_timeout_s)
        if self.fail(refusal):
            self._gate.refuse(refusal)
