"""One token looked up in one row, against float64, at the edges."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine_core.model.logprobs import token_logprobs


@pytest.mark.parametrize("scale", [0.0, 0.1, 3.0, 30.0, 1e4])
@pytest.mark.parametrize("num_top", [1, 20, 1000])
def test_values_are_those_of_float64(scale: float, num_top: int) -> None:
    logits = np.random.default_rng(1).normal(0.0, scale, 20_000).astype(np.float32)
    expected = torch.log_softmax(torch.from_numpy(logits).double(), -1)
    top = expected.sort(descending=True, stable=True)
    for token_id in (0, 19_999, int(logits.argmin())):
        found = token_logprobs(logits, token_id, num_top)
        assert found.logprob == pytest.approx(float(expected[token_id]), abs=1e-5)
        assert found.rank == 1 + int((expected > expected[token_id]).sum())
        assert list(found.top_token_ids) == top.indices[:num_top].tolist()
        assert found.top_logprobs == pytest.approx(top.values[:num_top].tolist(), abs=1e-5)


def test_all_probabilities_together_are_1() -> None:
    logits = np.random.default_rng(2).normal(0.0, 3.0, 500).astype(np.float32)
    found = token_logprobs(logits, 0, 500)
    assert sum(map(math.exp, found.top_logprobs)) == pytest.approx(1.0, abs=1e-6)
    assert token_logprobs(logits, 0, 9999) == found, "more than there are: all there are"


def test_the_likeliest_has_rank_1_and_equals_come_by_id() -> None:
    found = token_logprobs(np.array([0.0, 2.0, 1.0, 2.0, 2.0], np.float32), 4, 2)
    assert found.rank == 1, "no token is likelier"
    assert found.top_token_ids == (1, 3)
    assert found.logprob == found.top_logprobs[0]


def test_without_a_top_only_the_token_is_named() -> None:
    found = token_logprobs(np.array([0.0, 1.0], np.float32), 0, 0)
    assert (found.top_token_ids, found.top_logprobs, found.rank) == ((), (), 2)


def test_a_token_beyond_the_row_cannot_come() -> None:
    """A prompt may hold an id that the model has and the tokenizer does not."""
    logits = np.array([0.0, 1.0, -3e38], np.float32)
    found = token_logprobs(logits, 3, 2)
    assert (found.token_id, found.logprob, found.rank, found.top_token_ids) == (3, -math.inf, 4, (1, 0))
    assert found.top_logprobs == token_logprobs(logits, 0, 2).top_logprobs


def test_logits_of_any_finite_size_do_not_fail() -> None:
    found = token_logprobs(np.array([3e38, -3e38], np.float32), 1, 2)
    assert found.rank == 2 and found.top_token_ids == (0, 1) and found.logprob < -5e38
