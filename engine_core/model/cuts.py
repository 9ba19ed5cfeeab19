"""Which tokens stay: the k likeliest of a row, and the nucleus. Neither sorts more of the vocabulary than it must."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine_core.model.noise import FloatRow

Places = NDArray[np.intp]

# Of a usual row, the tokens within so much of its best logit are a few hundred, and more than anybody's top_k.
_USUAL_HEAD = np.float32(10.0)
# How far down to look for a nucleus: at most 1,000 tokens can be as likely as the first says, and mostly they are
# enough.
_USUAL_PROBABILITIES = (1e-3, 1e-4, 1e-5)
# So many are sorted faster than a histogram of the whole row is made.
_MAX_USUAL_HEAD = 8192
# A bin of that histogram: weights that agree in sign, exponent and 7 bits of the fraction.
_BIN_SHIFT = np.uint32(16)


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
    stays = values > limit
    stays[np.flatnonzero(values == limit)[: num - int(np.count_nonzero(stays))]] = True
    return np.flatnonzero(stays)


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
        if len(head) > _MAX_USUAL_HEAD:
            break
        if len(head) > 0 and float(weights[head].sum(dtype=np.float64)) >= goal:  # nothing reaches a goal of 0, too
            num_kept = _num_kept(weights[head], 0.0, goal)
            return head if num_kept == len(head) else head[_greatest(logits[head], num_kept)]
    return _wide_nucleus(logits, weights, goal)


def _num_kept(weights: FloatRow, weight_before: float, goal: float) -> int:
    """Count the tokens that stay: while those before have not reached the goal. The first always does."""
    before = weight_before + np.cumsum(np.sort(weights)[::-1], dtype=np.float64)
    return 1 + int(np.count_nonzero(before[:-1] < goal))


def _wide_nucleus(logits: FloatRow, weights: FloatRow, goal: float) -> Places:
    """Find the bin of weights in which the goal is reached, and sort only that one::

    bin       0 ... c-2 | c-1    c    c+1 | c+2 ...
    tokens    out       | to be looked at | stay     exp() is off by a bit: near an edge, a greater logit may
                                                     have the smaller weight
    """
    bins = (weights.view(np.uint32) >> _BIN_SHIFT).astype(np.intp)
    weight_down_to = np.cumsum(np.bincount(bins, weights)[::-1])[::-1]
    if weight_down_to[0] < goal:  # by rounding: top_p is as good as 1
        return np.arange(len(weights))
    crossing = int(np.count_nonzero(weight_down_to >= goal)) - 1
    weight_above = float(weight_down_to[crossing + 1]) if crossing + 1 < len(weight_down_to) else 0.0
    num_kept = int(np.count_nonzero(bins > crossing)) + _num_kept(weights[bins == crossing], weight_above, goal)
    stays = bins > crossing + 1
    near = np.flatnonzero((bins >= crossing - 1) & ~stays)
    stays[near[_greatest(logits[near], num_kept - int(np.count_nonzero(stays)))]] = True
    return np.flatnonzero(stays)
