from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from engine_core import EngineCoreOutputs, SchedulerStats
from server.errors import ErrorKind, RequestError
from server.generation import GenerationRequest
from server.overload.gate import Gate, Permit
from server.overload.limits import Limits
from server.overload.refusals import Reason, Refusal
from server.principal import Principal, Scope
from tests.server.fake_engine import create_request
from tests.server.fake_engine_client import FakeEngineClient

ALICE, BOB = (Principal(name, frozenset({Scope.USER})) for name in ("alice", "bob"))


class FakeMetrics:
    def __init__(self) -> None:
        self.rejections: list[str] = []

    def count_rejection(self, reason: str) -> None:
        self.rejections.append(reason)


class GateFixture:
    def __init__(self, **limits: Any) -> None:
        self.now = 1000.0
        self.client = FakeEngineClient()
        self.metrics = FakeMetrics()
        self.gate = Gate(
            engine_client=self.client, limits=Limits(**limits), metrics=self.metrics, clock=lambda: self.now
        )

    def permit(self, principal: Principal = ALICE, label: str = "label") -> Permit:
        return self.gate.create_permit(principal, label)

    def start(self, *request_ids: str, **stats: int) -> None:
        """Let the engine tell of a step that started these."""
        outputs = EngineCoreOutputs([], SchedulerStats(**stats), started_req_ids=list(request_ids))
        self.client.backlog.note_step(outputs, (), self.now)

    @property
    def load(self) -> tuple[int, int, int]:
        """Permits, queued requests, queued tokens."""
        backlog = self.gate.backlog
        return self.gate.num_permits, backlog.num_requests, backlog.num_tokens


def requests(*names: str, num_tokens: int = 5) -> list[GenerationRequest]:
    return [create_request(name, prompt="x" * num_tokens) for name in names]


def refused(permit: Permit, *call: Any) -> Refusal:
    """Enter, or call another method with its arguments, in vain."""
    method, *args = call or ("enter",)
    with pytest.raises(Refusal) as caught:
        getattr(permit, method)(*args)
    return caught.value


def test_without_limits_everybody_gets_in_and_all_is_given_back() -> None:
    g = GateFixture()
    permits = [g.permit() for _ in range(100)]
    for number, permit in enumerate(permits):
        permit.enter()
        permit.reserve(2, 10**9)
        permit.admit(f"cmpl-{number}", requests(f"{number}-0", f"{number}-1"))
    assert g.load == (100, 200, 1000)
    for permit in permits:
        with permit:
            pass
    assert g.load == (0, 0, 0)
    assert g.metrics.rejections == []


# ---------------------------------------------------------------------- the queue
def test_beyond_the_seats_so_many_may_wait_and_no_more() -> None:
    g = GateFixture(max_queued_requests=2, max_num_seqs=3)
    for number in range(5):
        permit = g.permit()
        permit.enter()
        permit.reserve(1, 4)
        permit.admit(f"cmpl-{number}", requests(f"{number}"))
    error = refused(g.permit())
    assert (error.reason, error.kind, error.reply.status, error.retry_after_s) == (
        Reason.QUEUE_FULL, ErrorKind.QUEUE_FULL, 503, 1,
    )  # fmt: skip
    g.start("0", "1", "2", num_running=3, num_waiting=2)
    assert refused(g.permit()).reason is Reason.QUEUE_FULL, "the seats are taken, and two wait"
    g.start("3", num_running=3, num_waiting=1)
    g.permit().enter()
    assert g.metrics.rejections == ["queue_full"] * 2


def test_all_choices_of_a_request_count_at_once() -> None:
    g = GateFixture(max_queued_requests=4)
    first, second = g.permit(), g.permit()
    first.enter()
    first.reserve(2, 0)
    second.enter()
    assert refused(second, "reserve", 3, 0).reason is Reason.QUEUE_FULL
    second.reserve(2, 0)
    assert g.load[1] == 4


def test_an_empty_queue_takes_whatever_comes_or_it_would_never_be_served() -> None:
    g = GateFixture(max_queued_requests=1, max_queued_tokens=10)
    permit = g.permit()
    permit.enter()
    permit.reserve(256, 10**6)
    permit.admit("cmpl", requests("a", "b", num_tokens=50))
    assert refused(g.permit()).reason is Reason.QUEUE_FULL


def test_prompt_tokens_are_guessed_first_and_counted_then() -> None:
    g = GateFixture(max_queued_tokens=100)
    first, second, third = g.permit(), g.permit(), g.permit()
    for permit in (first, second, third):
        permit.enter()
    first.reserve(1, 16 * 60)
    assert refused(second, "reserve", 1, 16 * 41).reason is Reason.QUEUE_TOKENS_FULL
    second.reserve(1, 16 * 40)
    first.admit("cmpl-1", requests("a", num_tokens=30))
    assert g.load[2] == 70
    # It turns out to be longer than guessed: what it holds itself is not in its way, what the other holds is.
    error = refused(second, "admit", "cmpl-2", requests("b", num_tokens=71))
    assert (error.reason, error.reply.code) == (Reason.QUEUE_TOKENS_FULL, "queue_full")
    second.admit("cmpl-2", requests("b", num_tokens=70))
    assert refused(third, "reserve", 1, 16).reason is Reason.QUEUE_TOKENS_FULL
    g.start("a", num_running=1)
    third.reserve(1, 16 * 30)
    assert g.metrics.rejections == ["queue_tokens_full"] * 3


def test_a_change_of_limits_holds_for_whoever_comes_next() -> None:
    g = GateFixture(max_queued_requests=1)
    for _ in range(2):
        permit = g.permit()
        permit.enter()
        permit.reserve(1, 0)
        g.gate.limits = replace(g.gate.limits, max_queued_requests=2)
    assert refused(g.permit()).reason is Reason.QUEUE_FULL
    g.gate.limits = replace(g.gate.limits, max_queued_requests=0)
    g.permit().enter()
    assert g.gate.allocated.max_queued_requests == 1


# ---------------------------------------------------------------------- keys
def test_a_key_may_have_so_many_in_hand_and_another_key_as_many() -> None:
    g = GateFixture(max_requests_per_key=2)
    with g.permit() as first:
        first.enter()
        second = g.permit()
        second.enter()
        error = refused(g.permit())
        assert (error.reason, error.reply.status, error.retry_after_s) == (Reason.KEY_CONCURRENCY, 429, 1)
        g.permit(BOB).enter()
    g.permit().enter()
    assert refused(g.permit()).reason is Reason.KEY_CONCURRENCY
    assert g.metrics.rejections == ["key_concurrency"] * 2


def test_a_key_may_send_so_many_a_minute_and_hears_when_the_next_one_may_come() -> None:
    g = GateFixture(max_requests_per_minute=6)
    for _ in range(6):
        with g.permit() as permit:
            permit.enter()
    error = refused(g.permit())
    assert (error.reason, error.reply.code, error.retry_after_s) == (Reason.KEY_RATE, "rate_limit_exceeded", 10)
    g.permit(BOB).enter()
    g.now += 10.0
    with g.permit() as permit:
        permit.enter()
    assert refused(g.permit()).retry_after_s == 10
    assert g.load[0] == 1, "Bob's"


def test_a_request_that_finds_the_server_full_costs_its_key_nothing() -> None:
    g = GateFixture(max_requests_per_minute=2, max_queued_requests=1)
    first = g.permit()
    first.enter()
    first.reserve(1, 0)
    assert refused(g.permit()).reason is Reason.QUEUE_FULL
    with first:
        pass
    g.permit().enter()
    assert refused(g.permit()).reason is Reason.KEY_RATE


# ---------------------------------------------------------------------- deadlines
async def wait_for_failure(g: GateFixture) -> RequestError:
    async with asyncio.timeout(5):
        await g.client.has_failed.wait()
    ((_, error), *_) = g.client.failed
    return error


async def test_who_is_not_started_in_time_is_given_up_and_told_so() -> None:
    g = GateFixture(queue_timeout_s=0.01)
    g.client.live_ids = {"a", "b"}
    with g.permit() as permit:
        permit.enter()
        permit.admit("cmpl", requests("a", "b"))
        error = await wait_for_failure(g)
    assert isinstance(error, Refusal) and (error.reason, error.reply.status) == (Reason.QUEUE_TIMEOUT, 503)
    assert [name for name, _ in g.client.failed] == ["a", "b"]
    assert g.metrics.rejections == ["queue_timeout"]


async def test_one_choice_that_is_started_stops_the_clock_of_the_queue_for_all() -> None:
    g = GateFixture(queue_timeout_s=0.01, request_timeout_s=0.05)
    g.client.live_ids = {"a", "b"}
    with g.permit() as permit:
        permit.enter()
        permit.admit("cmpl", requests("a", "b"))
        g.start("b", num_running=1)
        error = await wait_for_failure(g)
    assert isinstance(error, Refusal) and (error.reason, error.reply.status) == (Reason.REQUEST_TIMEOUT, 400)
    assert g.metrics.rejections == ["request_timeout"]


async def test_the_time_that_a_body_took_counts() -> None:
    g = GateFixture(request_timeout_s=3600)
    g.client.live_ids = {"a"}
    with g.permit() as permit:
        permit.enter()
        g.now += 4000
        permit.admit("cmpl", requests("a"))
        assert isinstance(await wait_for_failure(g), Refusal)


async def test_an_end_that_comes_before_the_engine_has_the_request_is_tried_again_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("server.overload.gate._ON_THE_WAY_S", 0.01)
    g = GateFixture()
    with g.permit() as permit:
        permit.enter()
        permit.admit("cmpl", requests("a"))
        error = RequestError("Enough.", kind=ErrorKind.CANCELLED)
        assert permit.fail(error)
        g.client.live_ids = {"a"}
        assert await wait_for_failure(g) is error
        g.now += 1
        assert not permit.fail(error), "by now it has ended"


def test_who_is_ended_while_it_is_tokenised_does_not_reach_the_engine() -> None:
    g = GateFixture()
    permit = g.permit(label="mine")
    permit.enter()
    assert g.gate.abort(["mine", "other"]) == {"mine": 1, "other": 0}
    with pytest.raises(RequestError, match="operator"):
        permit.admit("cmpl", requests("a"))
    with permit:
        pass
    assert g.load[1] == 0


# ---------------------------------------------------------------------- ends
async def test_requests_are_aborted_by_label_by_answer_and_by_choice() -> None:
    g = GateFixture()
    g.client.live_ids = {"cmpl-1-0", "cmpl-1-1", "cmpl-2"}
    for name, label in (("cmpl-1-0", "x"), ("cmpl-2", "x")):
        permit = g.permit(label=label)
        permit.enter()
        permit.admit("cmpl-1" if name == "cmpl-1-0" else name, requests(name))
    assert g.gate.abort(["nobody"]) == {"nobody": 0}
    assert g.gate.abort(["cmpl-1-0"]) == {"cmpl-1-0": 1}
    assert [name for name, _ in g.client.failed] == ["cmpl-1-0"]
    g.now += 1
    assert g.gate.abort(["x", "cmpl-2"]) == {"x": 1, "cmpl-2": 1}, "the first has ended already"
    assert g.metrics.rejections == [], "nobody was turned away for load"


async def test_a_thousand_requests_cancelled_anywhere_leave_nothing_in_hand() -> None:
    """A16: a permit is given back once, on every path."""
    rng = random.Random(16)
    g = GateFixture(
        max_queued_requests=20, max_queued_tokens=400, max_num_seqs=4, max_requests_per_key=40, queue_timeout_s=0.001
    )

    async def visit(number: int) -> None:
        with g.permit(rng.choice([ALICE, BOB])) as permit:
            await asyncio.sleep(0)
            permit.enter()
            await asyncio.sleep(0)
            permit.reserve(rng.randint(1, 3), rng.randint(0, 2000))
            await asyncio.sleep(0)
            permit.admit(f"cmpl-{number}", requests(*(f"{number}-{each}" for each in range(rng.randint(1, 3)))))
            for _ in range(rng.randint(0, 5)):
                await asyncio.sleep(0)
            if rng.random() < 0.1:
                raise RequestError("It failed.", kind=ErrorKind.INTERNAL)

    async def live(number: int) -> None:
        task = asyncio.create_task(visit(number))
        for _ in range(rng.randint(0, 8)):
            await asyncio.sleep(0)
        if rng.random() < 0.5:
            task.cancel()
        g.start(f"{number}-0", num_running=rng.randint(0, 4))
        await asyncio.gather(task, return_exceptions=True)

    await asyncio.gather(*map(live, range(1000)))
    assert g.load == (0, 0, 0)
    assert len(g.gate._keys) == 0
    assert {"queue_full", "queue_tokens_full"} & set(g.metrics.rejections), "it was busy"


# ---------------------------------------------------------------------- what the engine has no part in
def test_what_does_not_wait_for_the_engine_gets_in_when_its_queue_is_full_but_counts_for_its_key() -> None:
    g = GateFixture(max_queued_requests=1, max_requests_per_key=2)
    waiting = g.permit(BOB)
    waiting.enter()
    waiting.reserve(1, 0)
    assert refused(g.permit()).reason is Reason.QUEUE_FULL
    texts = [g.permit(), g.permit()]
    for text in texts:
        text.enter_aside()
    assert g.load == (1, 1, 0), "it is no request for the engine"
    assert refused(g.permit(), "enter_aside").reason is Reason.KEY_CONCURRENCY
    with texts[0]:
        pass
    g.permit().enter_aside()


def test_what_does_not_wait_for_the_engine_is_one_of_its_keys_requests_a_minute() -> None:
    g = GateFixture(max_requests_per_minute=1)
    with g.permit() as first:
        first.enter_aside()
    assert refused(g.permit()).reason is Reason.KEY_RATE
    assert refused(g.permit(), "enter_aside").reason is Reason.KEY_RATE
    g.permit(BOB).enter_aside()


def test_what_does_not_wait_for_the_engine_cannot_be_aborted() -> None:
    g = GateFixture()
    g.permit(label="mine").enter_aside()
    assert g.gate.abort(["mine"]) == {"mine": 0}
