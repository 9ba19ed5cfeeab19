from __future__ import annotations

import random

import pytest

from engine_core import EngineCoreOutputs, SchedulerStats
from server.overload.backlog import Backlog, Place
from server.records import RequestRecord


def note(
    backlog: Backlog,
    now: float = 0.0,
    *,
    started: tuple[str, ...] = (),
    ended: tuple[RequestRecord, ...] = (),
    **stats: float,
) -> None:
    outputs = EngineCoreOutputs([], SchedulerStats(**stats), started_req_ids=list(started))  # type: ignore[arg-type]
    backlog.note_step(outputs, ended, now)


def ended_with(num_output_tokens: int) -> RequestRecord:
    return RequestRecord("r", 0.0, 5, num_output_tokens=num_output_tokens, first_token_time=1.0)


def test_what_was_guessed_is_replaced_by_what_was_counted_and_goes_as_it_is_scheduled() -> None:
    backlog, starts = Backlog(), []
    place, other = Place(backlog), Place(backlog)
    other.take(1, 100)
    place.take(3, 7)
    assert (backlog.num_requests, backlog.num_tokens) == (4, 107)
    place.settle({"a": 10, "b": 10, "c": 20}, lambda: starts.append(1))
    assert (place.num_requests, place.num_tokens) == (3, 40)
    note(backlog, started=("b", "of somebody else"))
    assert (backlog.num_requests, backlog.num_tokens, starts) == (3, 130, [1])
    note(backlog, started=("a", "b", "c"))
    assert (place.num_requests, place.num_tokens, starts) == (0, 0, [1, 1, 1])
    assert (backlog.num_requests, backlog.num_tokens) == (1, 100)


def test_whoever_leaves_takes_its_requests_along_once_and_late_news_of_them_is_none() -> None:
    backlog = Backlog()
    place = Place(backlog)
    place.settle({"a": 10, "b": 10}, lambda: None)
    note(backlog, started=("a",))
    for _ in range(2):
        place.leave()
        assert (backlog.num_requests, backlog.num_tokens) == (0, 0)
    note(backlog, started=("b",))
    assert (backlog.num_requests, backlog.num_tokens) == (0, 0)


def test_whatever_happens_in_whatever_order_nothing_is_left() -> None:
    rng, backlog, places = random.Random(3), Backlog(), {}
    for number in range(2000):
        place = Place(backlog)
        place.take(rng.randint(1, 4), rng.randint(0, 100))
        if rng.random() < 0.8:
            ids = {f"{number}-{choice}": rng.randint(1, 50) for choice in range(rng.randint(1, 4))}
            place.settle(ids, lambda: None)
            places[number] = (place, ids)
            note(backlog, started=tuple(each for each in ids if rng.random() < 0.5))
        else:
            place.leave()
        if places and rng.random() < 0.7:
            gone, ids = places.pop(rng.choice(list(places)))
            gone.leave()
            note(backlog, started=tuple(ids))
    for place, _ in places.values():
        place.leave()
    assert (backlog.num_requests, backlog.num_tokens, backlog._places) == (0, 0, {})


def test_an_engine_that_left_nobody_waiting_has_its_free_seats_for_newcomers() -> None:
    backlog = Backlog()
    assert backlog.count_free_seats(8) == 8, "before its first step"
    note(backlog, num_running=5)
    assert backlog.count_free_seats(8) == 3
    assert backlog.count_free_seats(4) == 0, "lowered meanwhile"
    note(backlog, num_running=5, num_waiting=1)
    assert backlog.count_free_seats(8) == 0, "it has three seats, but no blocks for whoever waits"


def test_the_time_to_come_back_follows_from_tokens_and_pace() -> None:
    backlog = Backlog()
    assert backlog.estimate_retry_after_s() == 1
    for number in range(100):  # 100 tokens a second
        note(backlog, float(number), num_steps=1, num_step_prompt_tokens=80, num_step_generation_tokens=20,
             step_time_s=1.0, num_running=4)  # fmt: skip
    assert backlog.estimate_retry_after_s() == 1, "no answer has ended yet, so nobody knows how long they get"
    note(backlog, 99.0, ended=(ended_with(45),), num_running=4)
    assert backlog.estimate_retry_after_s() == 2
    Place(backlog).take(6, 700)
    assert backlog.estimate_retry_after_s() == 12  # 700 + (6 + 4) * 45
    Place(backlog).take(0, 10**6)
    assert backlog.estimate_retry_after_s() == 60


def test_the_mean_answer_follows_what_ends_and_not_what_never_began() -> None:
    backlog = Backlog()
    note(backlog, num_steps=1, num_step_generation_tokens=10, step_time_s=1.0, num_running=1)
    note(backlog, ended=(ended_with(100),), num_running=1)
    assert backlog.estimate_retry_after_s() == 10
    note(backlog, ended=(RequestRecord("aborted while it waited", 0.0, 5),), num_running=1)
    assert backlog.estimate_retry_after_s() == 10
    for _ in range(100):
        note(backlog, ended=(ended_with(20),), num_running=1)
    assert backlog.estimate_retry_after_s() == 3


def test_steps_that_overlap_count_the_time_between_them_and_idle_time_counts_for_nothing() -> None:
    backlog = Backlog()
    for number in range(50):  # each takes 2 s, but one ends every second
        note(backlog, float(number), num_steps=1, num_step_generation_tokens=10, step_time_s=2.0, num_running=1)
    assert backlog._rate.tokens_per_s == pytest.approx(10, rel=0.1)
    note(backlog, 49.0)  # nothing runs any more, for an hour
    note(backlog, 3600.0, num_steps=1, num_step_generation_tokens=10, step_time_s=1.0, num_running=1)
    assert backlog._rate.tokens_per_s == pytest.approx(10, rel=0.1)


def test_news_without_a_step_change_no_rate() -> None:
    backlog = Backlog()
    backlog.note_step(EngineCoreOutputs([], engine_error="dead"), (), 1.0)
    note(backlog, 1.0, num_running=3)
    assert backlog._rate.tokens_per_s == 0.0
