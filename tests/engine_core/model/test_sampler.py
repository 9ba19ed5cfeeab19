"""The sampler: greedy, distributions, and independence of everything but the row itself."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from engine_core.model.sampler import DrawPurpose, sample, uniform
from engine_core.sampling_params import SamplingParams


def params(**overrides: object) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 10, **overrides})  # type: ignore[arg-type]


def random_logits(rows: int, vocab: int = 50, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2


def test_greedy_takes_the_maximum() -> None:
    logits = random_logits(4)
    samples = sample(logits, [params(temperature=0.0)] * 4, [0] * 4)
    assert samples.token_ids == logits.argmax(-1).tolist()
    assert samples.is_valid == [True] * 4


def test_uniform_depends_on_all_its_arguments_and_lies_in_range() -> None:
    points = {uniform(seed, index, DrawPurpose.SAMPLE) for seed in range(-5, 5) for index in range(100)}
    assert len(points) == 1000
    assert all(0.0 <= point < 1.0 for point in points)
    assert abs(sum(points) / 1000 - 0.5) < 0.05


def test_frequencies_follow_the_softmax() -> None:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    draws = Counter(sample(logits, [params(seed=7, temperature=1.5)], [index]).token_ids[0] for index in range(4000))
    expected = torch.softmax(logits[0] / 1.5, -1)
    for token, probability in enumerate(expected.tolist()):
        assert draws[token] / 4000 == pytest.approx(probability, abs=0.03)


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"), [(2, 1.0, {0, 1}), (0, 0.6, {0}), (0, 0.7, {0, 1}), (3, 0.95, {0, 1, 2})]
)
def test_top_k_and_top_p_cut_the_tail(top_k: int, top_p: float, kept: set[int]) -> None:
    # Probabilities about .64 .24 .09 .03
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    options = [params(seed=3, top_k=top_k, top_p=top_p, temperature=1.0)]
    assert {sample(logits, options, [index]).token_ids[0] for index in range(500)} == kept


@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("top_p", [0.0, 5e-324])
def test_the_smallest_top_p_leaves_the_likeliest_token(top_p: float, top_k: int) -> None:
    logits = torch.tensor([[0.0, 0.1, 0.0, 0.0, 0.0, 0.0]])
    assert sample(logits, [params(top_p=top_p, top_k=top_k, temperature=2.0)], [0]).token_ids == [1]


def test_a_flat_distribution_needs_more_than_the_candidates() -> None:
    logits = torch.zeros(1, 5000)
    drawn = {sample(logits, [params(seed=1, top_p=0.99)], [index]).token_ids[0] for index in range(300)}
    assert len(drawn) > 250, "top_p 0.99 of 5,000 equal tokens keeps nearly all of them"


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    index=st.integers(0, 10_000),
    temperature=st.sampled_from([0.0, 1e-6, 0.7, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.1, 1e-9]),
    top_k=st.sampled_from([0, 1, 5, 1000]),
    row=st.integers(0, 5),
)
def test_a_row_does_not_know_its_neighbours(
    seed: int, index: int, temperature: float, top_p: float, top_k: int, row: int
) -> None:
    mine = params(seed=seed, temperature=temperature, top_p=top_p, top_k=top_k)
    logits = random_logits(6)
    alone = sample(logits[row : row + 1], [mine], [index]).token_ids[0]
    others = [params(seed=n, temperature=n / 3, top_p=1 - n / 10, top_k=n) for n in range(6)]
    others[row] = mine
    indices = [n * 7 for n in range(6)]
    indices[row] = index
    assert sample(logits, others, indices).token_ids[row] == alone


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_row_that_is_not_finite_is_named_and_touches_nobody(bad: float) -> None:
    logits = random_logits(3)
    clean = sample(logits, [params(seed=1)] * 3, [0] * 3).token_ids
    logits[1, 4] = bad
    samples = sample(logits, [params(seed=1)] * 3, [0] * 3)
    assert samples.is_valid == [True, False, True]
    assert [samples.token_ids[0], samples.token_ids[2]] == [clean[0], clean[2]]


def test_a_tiny_temperature_is_greedy_not_an_overflow() -> None:
    logits = random_logits(1) * 1e4
    assert sample(logits, [params(temperature=1e-300)], [0]).token_ids == logits.argmax(-1).tolist()


@settings(max_examples=150, deadline=None)
# top_p times what top_k leaves underflows to 0: sampling from nothing, once the end of the server.
@example(logits=[0.0] * 8, temperature=2.0, top_p=5e-324, top_k=2, seed=0)
@given(
    logits=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=30),
    # Random floats seldom lie at the edges, where products underflow: those are drawn by name.
    temperature=st.sampled_from([0.0, 5e-324, 1e-300, 2.0]) | st.floats(0.0, 2.0),
    top_p=st.sampled_from([5e-324, 1e-320, 2.3e-308, 1.0]) | st.floats(0.0, 1.0, exclude_min=True),
    top_k=st.sampled_from([0, 1, 2, 2**63 - 1]) | st.integers(0, 40),
    seed=st.integers(0, 2**63 - 1),
)
def test_no_setting_that_a_request_may_send_and_no_finite_logits_fail(
    logits: list[float], temperature: float, top_p: float, top_k: int, seed: int
) -> None:
    """A step that raises ends the server, so nothing within the limits may raise, at their edges least of all."""
    options = [params(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)]
    samples = sample(torch.tensor([logits], dtype=torch.float32), options, [0])
    assert samples.is_valid == [True]
    assert 0 <= samples.token_ids[0] < len(logits)
