"""Which tokens stay: the k likeliest of a row, and the nucleus. Neither sorts more of the vocabulary than it must."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine_core.model.noise import FloatRow

Places = NDArray[np.intp]

# Of a usual row, the tokens within so much of its best logit are a few hundred, and more than anybody's top_k.
_USUAL_HEAD = np.float32(10.0)
# The first look at a nucleus: at most 1,000 tokens can be so likely, and nearly always they are enough.
_USUAL_PROBABILITY = 1e-3


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
    """Return the smallest set of likeliest tokens whose share of all weight reaches ``top_p``, likeliest first.

    Args:
        logits: [n], for the order: weights may be equal where logits are not.
        weights: [n], not negative, at least one above 0.
        top_p: Below 1.
    """
    goal = top_p * float(weights.sum(dtype=np.float64))
    for least in _least_weights(weights, top_p):
        head = np.flatnonzero(weights >= least)
        mass = float(weights[head].sum(dtype=np.float64))
        if mass >= goal:
            break
    order = by_likelihood(logits, head)
    before = np.cumsum(weights[order], dtype=np.float64)
    # A token stays while those before it have not reached the goal; the first always does, however small the goal.
    return order[: 1 + int(np.count_nonzero(before[:-1] < goal))]


def _least_weights(weights: FloatRow, top_p: float) -> tuple[np.float32, np.float32, np.float32]:
    """Weights to look down to, each only if what the one before it left is too little.

    All tokens below the second weigh less than 1 - top_p of the whole together, so those above it suffice, rounding
    aside.
    """
    total = float(weights.sum(dtype=np.float64))
    enough = (1.0 - top_p) * total / len(weights)
    return np.float32(max(_USUAL_PROBABILITY * total, enough)), np.float32(enough), np.float32(0.0)
