"""One row's token: greedy, what each field lets through, how often it is drawn, and that nothing makes it fail."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from engine_core.model.cuts import nucleus
from engine_core.model.noise import FloatRow
from engine_core.model.sampler import OwnTokens, are_finite, pick_token
from engine_core.sampling_params import SamplingParams

NO_TOKENS = OwnTokens(np.empty(0, np.int32), np.empty(0, np.int32))
# How near a limit of top_p or min_p float32 may fall on its other side.
NEAR = 1e-4


def params(**overrides: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 10, **overrides})


def own(prompt: Sequence[int] = (), output: Sequence[int] = ()) -> OwnTokens:
    return OwnTokens(np.array(prompt, np.int32), np.array(output, np.int32))


def after(num_outputs: int, token_id: int = 0) -> OwnTokens:
    return own((), [token_id] * num_outputs)


def row(*logits: float) -> FloatRow:
    return np.array(logits, np.float32)


def random_row(vocab: int = 50, seed: int = 0) -> FloatRow:
    return np.random.default_rng(seed).normal(0.0, 2.0, vocab).astype(np.float32)


# ---------------------------------------------------------------------- the oracle: slow, float64, one token at a time
def oracle_logits(logits: FloatRow, asked: SamplingParams, tokens: OwnTokens) -> list[float]:
    prompt, output = tokens.prompt.tolist(), tokens.output.tolist()
    bent = []
    for token_id, raw in enumerate(logits.tolist()):
        logit = raw + asked.logit_bias.get(token_id, 0.0)
        if token_id in prompt or token_id in output:
            logit = logit / asked.repetition_penalty if logit > 0 else logit * asked.repetition_penalty
        logit -= asked.frequency_penalty * output.count(token_id)
        logit -= asked.presence_penalty if token_id in output else 0.0
        ends = set(asked.stop_token_ids) | (set() if asked.ignore_eos else set(asked.eos_token_ids))
        bent.append(-math.inf if token_id in ends and len(output) < asked.min_tokens else logit)
    return bent


def oracle_probs(logits: FloatRow, asked: SamplingParams, tokens: OwnTokens) -> dict[int, float] | None:
    """Return the probability of each token that may be drawn; None where that hangs on a number's last digits."""
    bent = oracle_logits(logits, asked, tokens)
    finite = sorted(logit for logit in bent if logit > -math.inf)
    if any(high - low < NEAR for low, high in pairwise(finite)):
        return None
    best = max(bent)
    weights = {token_id: math.exp((logit - best) / asked.temperature) for token_id, logit in enumerate(bent)}
    ranked = sorted(weights, key=lambda token_id: (-bent[token_id], token_id))
    if asked.top_k:
        ranked = ranked[: asked.top_k]
    total = sum(weights[token_id] for token_id in ranked)
    kept, before = [], 0.0
    for token_id in ranked:
        is_near_top_p = before > 0.0 and asked.top_p < 1.0 and abs(before - asked.top_p) < NEAR
        if is_near_top_p or 0.0 < abs(weights[token_id] - asked.min_p) < NEAR * asked.min_p:
            return None
        if (not kept or before < asked.top_p or asked.top_p == 1.0) and weights[token_id] >= asked.min_p:
            kept.append(token_id)
        before += weights[token_id] / total
    total = sum(weights[token_id] for token_id in kept)
    return {token_id: weights[token_id] / total for token_id in kept if weights[token_id] > 0.0}


def draw(logits: FloatRow, asked: SamplingParams, num_draws: int) -> Counter[int]:
    """Draw with as many seeds: neither field nor penalty depends on the seed."""
    seeds = [SamplingParams(**{**_fields(asked), "seed": seed}) for seed in range(num_draws)]
    return Counter(pick_token(logits, each, own()) for each in seeds)


def _fields(asked: SamplingParams) -> dict[str, Any]:
    return {name: getattr(asked, name) for name in SamplingParams.__slots__}


# ---------------------------------------------------------------------- greedy
def test_greedy_takes_the_maximum() -> None:
    logits = random_row(49_152)
    assert pick_token(logits, params(temperature=0.0), NO_TOKENS) == logits.argmax()


@pytest.mark.parametrize("options", [{"temperature": 0.0}, {"temperature": 0.7, "top_k": 1}])
def test_of_equals_the_lowest_id_wins(options: dict[str, float]) -> None:
    logits = random_row(500)
    logits[[77, 301, 499]] = 50.0
    assert pick_token(logits, params(**options), NO_TOKENS) == 77


@settings(max_examples=60, deadline=None)
@given(logits=st.lists(st.integers(-3, 3), min_size=2, max_size=40), seed=st.integers(0, 9))
def test_top_k_of_1_is_greedy(logits: list[int], seed: int) -> None:
    greedy = pick_token(row(*logits), params(temperature=0.0), NO_TOKENS)
    assert pick_token(row(*logits), params(temperature=1.0, top_k=1, seed=seed), NO_TOKENS) == greedy


def test_a_tiny_temperature_is_greedy_not_an_overflow() -> None:
    logits = random_row() * np.float32(1e4)
    for temperature in (1e-5, 1e-30, 1e-300, 5e-324):
        assert pick_token(logits, params(temperature=temperature), NO_TOKENS) == logits.argmax()


# ---------------------------------------------------------------------- every field against the oracle
FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "temperature": st.sampled_from([0.3, 0.7, 1.0, 2.0]),
    "top_k": st.sampled_from([0, 1, 2, 5, 11, 12, 100]),
    "top_p": st.sampled_from([1.0, 0.95, 0.9, 0.5, 0.1, 1e-9]),
    "min_p": st.sampled_from([0.0, 0.02, 0.1, 0.5, 1.0]),
    "repetition_penalty": st.sampled_from([1.0, 0.5, 1.1, 2.0]),
    "frequency_penalty": st.sampled_from([0.0, -1.0, 0.5, 2.0]),
    "presence_penalty": st.sampled_from([0.0, -2.0, 0.3, 2.0]),
    "logit_bias": st.dictionaries(st.integers(0, 11), st.sampled_from([-100.0, -1.0, 0.5, 100.0]), max_size=3),
    "eos_token_ids": st.frozensets(st.integers(0, 11), max_size=2),
    "stop_token_ids": st.frozensets(st.integers(0, 11), max_size=2),
    "ignore_eos": st.booleans(),
    "min_tokens": st.sampled_from([0, 3, 100]),
    "seed": st.integers(-(2**63), 2**63 - 1),
}
TOKENS = st.lists(st.integers(0, 11), max_size=8)


@settings(max_examples=400, deadline=None)
@given(seed=st.integers(0, 1000), options=st.fixed_dictionaries({}, optional=FIELDS), prompt=TOKENS, output=TOKENS)
def test_whatever_is_drawn_the_oracle_lets_through(
    seed: int, options: dict[str, Any], prompt: list[int], output: list[int]
) -> None:
    logits, asked, tokens = random_row(12, seed), params(**options), own(prompt, output)
    probs = oracle_probs(logits, asked, tokens)
    assume(probs is not None)
    for draw_seed in range(8):
        each = SamplingParams(**{**_fields(asked), "seed": draw_seed})
        assert pick_token(logits, each, tokens) in probs


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1000), options=st.fixed_dictionaries({}, optional=FIELDS), prompt=TOKENS, output=TOKENS)
def test_greedy_takes_what_the_oracle_finds_greatest(
    seed: int, options: dict[str, Any], prompt: list[int], output: list[int]
) -> None:
    logits, asked, tokens = random_row(12, seed), params(**{**options, "temperature": 0.0}), own(prompt, output)
    bent = oracle_logits(logits, asked, tokens)
    first, second = sorted(bent)[-1:-3:-1]
    assume(first - second > 1e-4)
    assert pick_token(logits, asked, tokens) == bent.index(first)


def check_frequencies(logits: FloatRow, asked: SamplingParams, tokens: OwnTokens, num_draws: int = 6000) -> None:
    """Chi-square of draws with many seeds against the oracle; rare tokens are counted together."""
    probs = oracle_probs(logits, asked, tokens)
    assert probs is not None, "another row is needed"
    seeds = (SamplingParams(**{**_fields(asked), "seed": seed}) for seed in range(num_draws))
    found = Counter(pick_token(logits, each, tokens) for each in seeds)
    assert set(found) <= set(probs)
    common = [token_id for token_id, prob in probs.items() if prob * num_draws >= 5.0]
    assert set(common) <= set(found)
    cells = [(found[token_id], probs[token_id] * num_draws) for token_id in common]
    rest = num_draws - sum(expected for _, expected in cells)
    if rest >= 5.0:
        cells.append((num_draws - sum(count for count, _ in cells), rest))
    chi_square = sum((count - expected) ** 2 / expected for count, expected in cells)
    freedom = max(1, len(cells) - 1)
    assert chi_square < freedom + 5 * (2 * freedom) ** 0.5, f"{chi_square:.1f} for {freedom} degrees of freedom"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="plain"),
        pytest.param({"temperature": 0.6}, id="cool"),
        pytest.param({"temperature": 2.0}, id="hot"),
        pytest.param({"top_k": 7}, id="top_k"),
        pytest.param({"top_p": 0.8}, id="top_p"),
        pytest.param({"min_p": 0.1}, id="min_p"),
        pytest.param({"top_k": 9, "top_p": 0.85, "min_p": 0.05}, id="all cuts"),
        pytest.param({"repetition_penalty": 1.5, "frequency_penalty": 0.4, "presence_penalty": 0.6}, id="penalties"),
        pytest.param({"logit_bias": {3: 4.0, 5: -100.0, 8: 2.5}, "top_p": 0.9}, id="bias"),
    ],
)
def test_frequencies_are_the_oracles(options: dict[str, Any]) -> None:
    check_frequencies(random_row(30, 4), params(**options), own([3, 8, 8, 29], [1, 1, 1, 8, 2]))


def test_frequencies_over_output_indices_are_the_softmax() -> None:
    """As one request sees them: one seed, index after index."""
    logits = row(2.0, 1.0, 0.0, -1.0)
    draws = Counter(pick_token(logits, params(seed=7, temperature=1.5), after(index)) for index in range(6000))
    expected = np.exp(logits / 1.5) / np.exp(logits / 1.5).sum()
    for token_id, probability in enumerate(expected.tolist()):
        assert draws[token_id] / 6000 == pytest.approx(probability, abs=0.02)


# ---------------------------------------------------------------------- one field at a time
@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_p": 0.6}, {0}),
        ({"top_p": 0.7}, {0, 1}),
        ({"top_p": 0.95, "top_k": 3}, {0, 1, 2}),
        ({"top_p": 0.72, "top_k": 2}, {0}),  # .731 of what top_k leaves
        ({"min_p": 0.13}, {0, 1, 2}),  # e**-2 is .135
        ({"min_p": 0.14}, {0, 1}),
        ({"min_p": 1.0}, {0}),
    ],
)
def test_top_k_top_p_and_min_p_cut_the_tail(options: dict[str, float], kept: set[int]) -> None:
    """Probabilities about .64 .24 .09 .03."""
    assert set(draw(row(3.0, 2.0, 1.0, 0.0), params(**options), 500)) == kept


@pytest.mark.parametrize("num_equal", [5, 3000])
def test_exactly_k_survive_ties(num_equal: int) -> None:
    logits = row(*[1.0] * num_equal, *[0.9] * 40)
    assert set(draw(logits, params(top_k=3), 200)) == {0, 1, 2}


@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("top_p", [0.0, 5e-324])
def test_the_smallest_top_p_leaves_the_likeliest_token(top_p: float, top_k: int) -> None:
    logits = row(0.0, 0.1, 0.0, 0.0, 0.0, 0.0)
    assert set(draw(logits, params(top_p=top_p, top_k=top_k, temperature=2.0), 30)) == {1}


@pytest.mark.parametrize("top_p", [0.5, 0.99, 1 - 1e-9])
def test_the_nucleus_of_a_flat_row_is_as_large_as_it_must_be(top_p: float) -> None:
    """No token is likely enough for the first look, so it must look further down."""
    logits = np.random.default_rng(0).normal(0.0, 0.1, 5000).astype(np.float32)
    weights = np.exp(logits)
    order = np.argsort(-logits, kind="stable")
    share = np.cumsum(weights[order].astype(np.float64)) / weights.sum(dtype=np.float64)
    assert nucleus(logits, weights, top_p).tolist() == sorted(order[: np.searchsorted(share, top_p) + 1].tolist())


def test_end_tokens_cannot_come_before_min_tokens_whatever_bias_they_get() -> None:
    asked = params(
        temperature=0.0,
        min_tokens=2,
        eos_token_ids=frozenset({1, 999}),
        stop_token_ids=frozenset({2, -1}),
        logit_bias={1: 100.0, 2: 50.0},
    )
    logits = row(0.0, 5.0, 4.0, 1.0)
    assert [pick_token(logits, asked, after(index, 3)) for index in range(4)] == [3, 3, 1, 1]
    ignoring = SamplingParams(**{**_fields(asked), "ignore_eos": True})
    assert pick_token(logits, ignoring, after(0)) == 1


def test_where_all_tokens_are_ends_one_of_them_comes() -> None:
    asked = params(temperature=1.0, min_tokens=5, eos_token_ids=frozenset({0, 1}))
    assert pick_token(row(0.0, 50.0), asked, NO_TOKENS) == 1


def test_biased_ids_outside_the_vocabulary_are_no_concern_of_the_engine() -> None:
    assert pick_token(row(0.0, 1.0), params(temperature=0.0, logit_bias={2: 100.0, -1: 100.0}), NO_TOKENS) == 1


def test_tokens_beyond_the_row_are_not_penalized() -> None:
    """A prompt of token ids may hold such as the tokenizer does not know, which the row is cut off before."""
    asked = params(temperature=0.0, repetition_penalty=2.0, frequency_penalty=1.0)
    assert pick_token(row(3.0, 2.0), asked, own([5, 0], [9])) == 1


def test_the_row_itself_stays_as_it_was() -> None:
    logits = random_row(12)
    kept = logits.copy()
    options = {"min_p": 0.1, "top_p": 0.5, "frequency_penalty": 1.0, "logit_bias": {1: 9.0}, "min_tokens": 9}
    pick_token(logits, params(**options), own([1], [2]))
    pick_token(logits, params(temperature=0.5), own())
    assert (logits == kept).all()


def test_a_rounding_error_hardly_ever_changes_a_draw() -> None:
    """Inverse-transform sampling of the same rows changed more than one draw in a thousand."""
    generator = np.random.default_rng(1)
    logits = generator.normal(0.0, 2.0, 49_152).astype(np.float32)
    changed = 0
    for seed in range(1500):
        noisy = logits + generator.normal(0.0, 1e-6, len(logits)).astype(np.float32)
        asked = params(seed=seed)
        changed += pick_token(logits, asked, NO_TOKENS) != pick_token(noisy, asked, NO_TOKENS)
    assert changed == 0


# ---------------------------------------------------------------------- nothing fails
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 4, 48, 49])
def test_a_row_that_is_not_finite_is_seen(bad: float, place: int) -> None:
    logits = np.stack([random_row(), random_row()])
    assert are_finite(logits).tolist() == [True, True]
    logits[1, place] = bad
    assert are_finite(logits).tolist() == [True, False]


@settings(max_examples=300, deadline=None)
# top_p times what top_k leaves underflows to 0: sampling from nothing, once the end of the server.
@example(logits=[0.0] * 8, temperature=2.0, top_p=5e-324, top_k=2, min_p=0.0, penalty=1.0, bias=0.0, seed=0)
@example(logits=[3e38, -3e38], temperature=1e-300, top_p=1.0, top_k=0, min_p=1.0, penalty=1e-3, bias=100.0, seed=0)
@given(
    logits=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=30),
    # Random floats seldom lie at the edges, where products underflow: those are drawn by name.
    temperature=st.sampled_from([0.0, 5e-324, 1e-300, 2.0]) | st.floats(0.0, 2.0),
    top_p=st.sampled_from([5e-324, 1e-320, 2.3e-308, 1.0]) | st.floats(0.0, 1.0, exclude_min=True),
    top_k=st.sampled_from([0, 1, 2, 2**63 - 1]) | st.integers(0, 40),
    min_p=st.sampled_from([0.0, 5e-324, 1.0]) | st.floats(0.0, 1.0),
    penalty=st.sampled_from([1.0, 5e-324, 1e300]) | st.floats(0.01, 100.0),
    bias=st.sampled_from([0.0, 100.0, -100.0]),
    seed=st.integers(-(2**63), 2**63 - 1),
)
def test_no_setting_that_a_request_may_send_and_no_finite_logits_fail(
    logits: list[float],
    temperature: float,
    top_p: float,
    top_k: int,
    min_p: float,
    penalty: float,
    bias: float,
    seed: int,
) -> None:
    """A step that raises ends the server, so nothing within the limits may raise, at their edges least of all."""
    asked = params(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=penalty,
        frequency_penalty=bias / 50,
        presence_penalty=-bias / 50,
        logit_bias={0: bias},
        seed=seed,
    )
    assert 0 <= pick_token(row(*logits), asked, own([0], [0, len(logits) - 1])) < len(logits)
