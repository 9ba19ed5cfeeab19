from __future__ import annotations

import pytest

from server.overload.drain_rate import DrainRate, bound_retry_after_s, compute_retry_after_s


def test_a_steady_pace_is_the_rate() -> None:
    rate = DrainRate()
    for _ in range(100):
        rate.add(50, 0.25)
    assert rate.tokens_per_s == pytest.approx(200, rel=0.01)


def test_the_recent_past_weighs_more_than_what_was_long_ago() -> None:
    rate = DrainRate(time_constant_s=10)
    for _ in range(1000):
        rate.add(1000, 1.0)
    for _ in range(30):
        rate.add(10, 1.0)
    assert 10 < rate.tokens_per_s < 100


def test_long_steps_and_short_ones_add_up_to_the_same_rate() -> None:
    fine, coarse = DrainRate(), DrainRate()
    for _ in range(400):
        fine.add(10, 0.1)
    for _ in range(20):
        coarse.add(200, 2.0)
    assert fine.tokens_per_s == pytest.approx(coarse.tokens_per_s, rel=0.05)


def test_before_anything_was_measured_the_rate_is_zero() -> None:
    assert DrainRate().tokens_per_s == 0.0
    rate = DrainRate()
    rate.add(5, 0.0)  # a clock that stands still
    assert rate.tokens_per_s == 0.0


@pytest.mark.parametrize(
    ("num_tokens", "tokens_per_s", "retry_after_s"),
    [
        (0, 100.0, 1),
        (1, 100.0, 1),
        (100, 100.0, 1),
        (101, 100.0, 2),
        (2000, 100.0, 20),
        (6000, 100.0, 60),
        (10**9, 100.0, 60),
        (10**9, 1e-300, 60),
        (10**9, 0.0, 1),
        (0, 0.0, 1),
    ],
)
def test_whoever_is_refused_comes_back_when_the_backlog_is_gone(
    num_tokens: int, tokens_per_s: float, retry_after_s: int
) -> None:
    assert compute_retry_after_s(num_tokens, tokens_per_s) == retry_after_s


@pytest.mark.parametrize(("seconds", "told"), [(-1.0, 1), (0.0, 1), (1.01, 2), (59.5, 60), (61.0, 60), (1e300, 60)])
def test_a_waiting_time_is_told_in_whole_seconds_within_bounds(seconds: float, told: int) -> None:
    assert bound_retry_after_s(seconds) == told
