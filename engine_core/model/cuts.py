"""Which tokens stay: the k likeliest of a row, and the nucleus. Neither sorts more of the vocabulary than it must."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine_core.model.noise import FloatRow

Places = NDArray[np.intp]

# Of a usual row, the tokens within so much of its best logit are a few hundred, and more than anybody's top_k.
_USUAL_HEAD = np.float32(10.0)
# How far down to look for a nucleus: at most 1,000 tokens can be as likely as the first says, and mostly they are
# enough. The last takes everything.
_USUAL_PROBABILITIES = (1e-3, 1e-4, 1e-5, 0.0)


def likeliest(logits: FloatRow, num: int) -> Places:
    """Return where the ``num`` greatest logits are, in the order of the row; equal ones by place, the first first.

    Args:
        logits: [n], no NaN, at least one finite.
        num: Below n.
    """
    head = np.flatnonzero(logits >= logits.max() - _USUAL_HEAD)
    if len(head) > num:
        return head[_greatest(logits[head], num)]
    return _greatest(logits, num) if len(head) < num else head


def _greatest(values: FloatRow, num: int) -> Places:
    limit = np.partition(values, len(values) - num)[len(values) - num]
    above = np.flatnonzero(values > limit)
    equal = np.flatnonzero(values == limit)[: num - len(above)]
    return np.sort(np.concatenate([above, equal]))


def by_likelihood(logits: FloatRow, places: Places) -> Places:
    """Return places, which are in the order of the row, likeliest first; equal ones keep their order."""
    return places[np.argsort(-logits[places], kind="stable")]


def nucleus(logits: FloatRow, weights: FloatRow, top_p: float) -> Places:
    """Return the smallest set of likeliest tokens whose share of all weight reaches ``top_p``, in the order of the row.

    Args:
        logits: [n], which say who comes first: weights may be equal where logits are not.
        weights: [n], not negative, at least one above 0; they rise with the logits.
        top_p: Below 1.
    """
    total = float(weights.sum(dtype=np.float64))
    goal = top_p * total
    for probability in _USUAL_PROBABILITIES:
        head = np.flatnonzero(weights >= np.float32(probability * total))
        if float(weights[head].sum(dtype=np.float64)) >= goal:
            break
    before = np.cumsum(np.sort(weights[head])[::-1], dtype=np.float64)
    # A token stays while those before it have not reached the goal; the first always does, however small the goal.
    num_kept = 1 + int(np.count_nonzero(before[:-1] < goal))
    return head if num_kept == len(head) else head[_greatest(logits[head], num_kept)]
