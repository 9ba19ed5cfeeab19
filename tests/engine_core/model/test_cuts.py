"""Cuts against a plain sort of the whole row: ties, flat rows, rows of one value, masked tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core.model.cuts import by_likelihood, likeliest, nucleus
from engine_core.model.noise import FloatRow

# Few values, so that most rows have ties, and -inf, which masked tokens have.
LOGITS = st.lists(st.sampled_from([-float("inf"), -40.0, -8.0, -3.0, -0.5, -0.25, 0.0, 2.0]), min_size=2, max_size=60)
TOP_P = st.sampled_from([0.0, 1e-9, 0.1, 0.25, 0.5, 0.8, 0.95, 0.999])


def row(*values: float) -> FloatRow:
    return np.array(values, np.float32)


def weigh(logits: FloatRow, temperature: float = 1.0) -> FloatRow:
    weights: FloatRow = np.exp((logits - logits.max()) / np.float32(temperature))
    return weights


def sort_all(logits: FloatRow) -> list[int]:
    return [int(place) for place in np.argsort(-logits, kind="stable")]


def expect_nucleus(logits: FloatRow, weights: FloatRow, top_p: float) -> list[int]:
    """Walk down the whole row until the goal is reached."""
    goal, before, kept = top_p * float(weights.sum(dtype=np.float64)), 0.0, []
    for place in sort_all(logits):
        if kept and before >= goal:
            break
        kept.append(place)
        before += float(weights[place])
    return sorted(kept)


# ---------------------------------------------------------------------- the k likeliest
@settings(max_examples=300, deadline=None)
@given(values=LOGITS, share=st.floats(0, 1, exclude_max=True))
def test_the_likeliest_are_the_first_of_a_sorted_row(values: list[float], share: float) -> None:
    logits = row(0.0, *values)
    num = 1 + int(share * (len(logits) - 1))
    found = likeliest(logits, num)
    assert found.tolist() == sorted(sort_all(logits)[:num])
    assert by_likelihood(logits, found).tolist() == sort_all(logits)[:num]


@pytest.mark.parametrize("num", [1, 2, 29])
@pytest.mark.parametrize("value", [0.0, -3e38, 3e38])
def test_of_equals_the_first_come_first(num: int, value: float) -> None:
    logits = row(*[value] * 30)
    assert likeliest(logits, num).tolist() == list(range(num))
    assert by_likelihood(logits, np.arange(30)).tolist() == list(range(30))


@pytest.mark.parametrize("num", [1, 2, 3])
def test_masked_tokens_come_last(num: int) -> None:
    logits = row(-np.inf, 1.0, -np.inf, -50.0)
    assert likeliest(logits, num).tolist() == [[1], [1, 3], [0, 1, 3]][num - 1]


# ---------------------------------------------------------------------- the nucleus
@settings(max_examples=300, deadline=None)
@given(values=LOGITS, top_p=TOP_P, copies=st.sampled_from([1, 1, 300]))
def test_a_nucleus_is_what_a_walk_down_the_sorted_row_finds(values: list[float], top_p: float, copies: int) -> None:
    """With many copies no token is likely enough for the quick look, so the histogram is asked."""
    logits = row(0.0, *values * copies)
    weights = weigh(logits)
    assert nucleus(logits, weights, top_p).tolist() == expect_nucleus(logits, weights, top_p)


@pytest.mark.parametrize("size", [12_000, 50_000])
@pytest.mark.parametrize("spread", [0.0, 0.001, 0.3, 1.0, 3.0, 8.0])
@pytest.mark.parametrize("temperature", [0.7, 2.0])
def test_a_long_row_is_cut_as_if_it_were_sorted(size: int, spread: float, temperature: float) -> None:
    rng = np.random.default_rng(size)
    logits = rng.normal(0.0, spread, size).astype(np.float32)
    logits[rng.integers(0, size, 50)] = -np.inf
    weights = weigh(logits, temperature)
    for top_p in (0.0, 0.01, 0.5, 0.95):
        assert nucleus(logits, weights, top_p).tolist() == expect_nucleus(logits, weights, top_p)


def test_tokens_of_one_weight_stay_by_their_logits() -> None:
    """At a high temperature logits that differ give weights that do not; the last token is the likeliest."""
    logits = np.linspace(0.0, 1e-6, 20_000, dtype=np.float32)
    weights = np.ones_like(logits)
    assert nucleus(logits, weights, 0.25).tolist() == expect_nucleus(logits, weights, 0.25)
    assert nucleus(logits, weights, 0.25)[-1] == 19_999


@pytest.mark.parametrize("num_equal", [3, 10_001])
def test_a_goal_that_is_just_reached_takes_no_more(num_equal: int) -> None:
    """Sums of ones are exact, whatever adds them up."""
    logits = np.zeros(4 * num_equal, np.float32)
    assert nucleus(logits, np.ones_like(logits), 0.25).tolist() == list(range(num_equal))
    assert nucleus(logits, np.ones_like(logits), 0.25 + 1e-9).tolist() == list(range(num_equal + 1))


def test_a_greater_logit_may_have_the_smaller_weight() -> None:
    """exp() is off by a bit here and there; at an edge of two bins of the histogram that moves a token over it."""
    edge = np.float32(1.0)
    logits = np.linspace(1.0, 0.0, 20_000, dtype=np.float32)
    weights = np.full_like(logits, np.nextafter(edge, np.float32(0.0)))
    weights[1::2] = edge
    for num in (1, 5000, 9_999, 10_001, 15_000, 19_999):
        top_p = (num - 0.5) / len(logits)
        assert nucleus(logits, weights, top_p).tolist() == list(range(num))


@pytest.mark.parametrize("seed", range(20))
def test_what_rounding_leaves_short_of_the_goal_is_the_whole_row(seed: int) -> None:
    """Two ways to add up the same weights differ, by more than this top_p leaves out."""
    logits = np.random.default_rng(seed).normal(0.0, 4.0, 30_000).astype(np.float32)
    assert len(nucleus(logits, weigh(logits), float(np.nextafter(1.0, 0.0)))) > 29_000


def test_one_token_is_its_own_nucleus() -> None:
    assert nucleus(row(3.0), row(1.0), 0.5).tolist() == [0]
    assert nucleus(row(-np.inf, 3.0), row(0.0, 1.0), 0.999).tolist() == [1]
