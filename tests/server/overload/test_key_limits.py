from __future__ import annotations

import random

import pytest

from server.overload.key_limits import KeyLimits, refill


def test_a_bucket_fills_steadily_and_holds_a_minutes_worth() -> None:
    assert refill(0.0, 1.0, 60) == 1.0
    assert refill(0.0, 30.0, 60) == 30.0
    assert refill(50.0, 30.0, 60) == 60.0
    assert refill(3.0, 0.0, 60) == 3.0


def test_a_minutes_requests_may_come_at_once_and_then_one_by_one() -> None:
    keys = KeyLimits()
    assert [keys.try_take("k", 100.0, per_minute=6) for _ in range(6)] == [0.0] * 6
    assert keys.try_take("k", 100.0, per_minute=6) == pytest.approx(10.0)
    assert keys.try_take("k", 105.0, per_minute=6) == pytest.approx(5.0)
    assert keys.try_take("k", 110.0, per_minute=6) == 0.0
    assert keys.try_take("k", 110.0, per_minute=6) == pytest.approx(10.0)
    assert keys.count_in_hand("k") == 7, "a refused one is not in hand"


def test_keys_do_not_know_of_each_other() -> None:
    keys = KeyLimits()
    for name in "ab":
        assert keys.try_take(name, 0.0, per_minute=1) == 0.0
    assert keys.try_take("a", 0.0, per_minute=1) > 0
    assert (keys.count_in_hand("a"), keys.count_in_hand("b"), keys.count_in_hand("c")) == (1, 1, 0)


def test_without_a_rate_a_key_with_nothing_in_hand_is_forgotten_at_once() -> None:
    keys = KeyLimits()
    for _ in range(2):
        assert keys.try_take("k", 0.0, per_minute=0) == 0.0
    keys.give_back("k", per_minute=0)
    assert (keys.count_in_hand("k"), len(keys)) == (1, 1)
    keys.give_back("k", per_minute=0)
    assert len(keys) == 0


def test_over_an_hour_no_key_gets_more_than_its_rate() -> None:
    keys, rng, now, num_taken = KeyLimits(), random.Random(1), 0.0, 0
    while now < 3600:
        now += rng.expovariate(2.0)
        if keys.try_take("k", now, per_minute=30) == 0.0:
            num_taken += 1
            keys.give_back("k", per_minute=30)
    assert 1790 <= num_taken <= 60 * 30 + 30


def test_many_keys_take_bounded_memory_and_those_in_use_are_kept() -> None:
    keys = KeyLimits(max_keys=100)
    for number in range(40):
        keys.try_take(f"busy {number}", 0.0, per_minute=60)
    for number in range(10_000):
        keys.try_take(f"{number}", number / 10, per_minute=60)
        keys.give_back(f"{number}", per_minute=60)
        assert len(keys) <= 100
    assert all(keys.count_in_hand(f"busy {number}") == 1 for number in range(40))


def test_at_a_burst_of_keys_it_is_the_used_up_buckets_that_stay_while_there_is_room() -> None:
    keys = KeyLimits(max_keys=10)
    keys.try_take("greedy", 0.0, per_minute=1)
    keys.give_back("greedy", per_minute=1)
    for number in range(30):
        # At a minute's distance each bucket is full again, but the greedy one keeps taking.
        now = 61.0 * (number + 1)
        assert keys.try_take("greedy", now, per_minute=1) == 0.0
        keys.give_back("greedy", per_minute=1)
        keys.try_take(f"{number}", now, per_minute=1)
        keys.give_back(f"{number}", per_minute=1)
        assert keys.try_take("greedy", now, per_minute=1) > 0, "its bucket was not forgotten"
