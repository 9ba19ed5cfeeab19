"""StepCost: how long a step takes, learnt from the steps that ran. Arithmetic only: knows no clock and no request."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# One of each weight's units takes roughly as long as the others': what is counted stays within a few sizes of 1.
_ROWS, _PAIRS, _TOKENS, _TOKEN_PAIRS = 16.0, 16_384.0, 256.0, 262_144.0
_TOKEN, _TOKEN_PAIR = 3, 4  # places of the two prompt weights

# Equal steps differ by this share of their time.
_NOISE = 0.1
# From step to step a weight may move by this share of itself, or of the step's time where it is next to nothing.
_DRIFT, _LEAST_DRIFT = 0.03, 0.003
# A step that misses its prediction by more than this share of it is odd. It counts as half as odd, and no more.
_ODD = 0.4


@dataclass(slots=True)
class StepLoad:
    """What a step computes, as far as its time depends on it.

    Attributes:
        num_decodes: Rows that decode.
        num_decode_pairs: Tokens that those look back on, summed over the rows.
        num_prompt_tokens: Prompt tokens, and tokens that a preemption threw away.
        num_prompt_pairs: Tokens that those look back on, summed over them.
    """

    num_decodes: int = 0
    num_decode_pairs: int = 0
    num_prompt_tokens: int = 0
    num_prompt_pairs: float = 0.0


class StepCost:
    """A step's time as a sum of five weights times what the step holds, fitted as steps come in.

    A Kalman filter whose weights drift. Three things are added to it. No weight is below zero, since work takes time.
    A weight that a step does not exercise keeps its value and its certainty: hours of plain decodes do not blur what a
    prompt costs. And one odd step moves little, being an accident; a second one of the same kind is news, and
    everything is learnt anew from there.

    Source: R. E. Kalman, "A New Approach to Linear Filtering and Prediction Problems", 1960.
    """

    def __init__(self) -> None:
        self._weights = [0.0] * 5  # seconds: a step, rows, their pairs, prompt tokens, their pairs
        self._covariance: list[list[float]] = []
        self._last_oddity = 0

    def predict(self, load: StepLoad) -> float:
        """Return seconds; 0 before the first step."""
        return _dot(self._weights, _count(load))

    def count_prompt_tokens(self, load: StepLoad, start: int, seconds: float) -> float:
        """Return how many prompt tokens, from position ``start`` on, a step of this load can take besides.

        Solves ``predict(load) + token * n + pair * n * (start + n / 2) = seconds`` for n.

        Returns:
            At least 0; infinite while tokens seem to cost nothing.
        """
        left = seconds - self.predict(load)
        if left <= 0.0:
            return 0.0
        pair = self._weights[_TOKEN_PAIR] / _TOKEN_PAIRS
        first = self._weights[_TOKEN] / _TOKENS + pair * start
        divisor = first + math.sqrt(first * first + 2.0 * pair * left)
        return 2.0 * left / divisor if divisor > 0.0 else math.inf

    def learn(self, load: StepLoad, seconds: float) -> float:
        """Take in a step that ran.

        Args:
            load: What it held.
            seconds: Above 0.

        Returns:
            By how much it was longer than predicted, as a share of the prediction; 0 where there was none.
        """
        if not self._covariance:
            self._doubt_all(seconds)
        counts = _count(load)
        predicted = _dot(self._weights, counts)
        miss = seconds - predicted
        share = miss / predicted if predicted > 0.0 else 0.0
        oddity = (share > _ODD) - (share < -_ODD)
        if oddity and oddity == self._last_oddity:
            self._doubt_all(seconds)
        elif oddity:
            miss = oddity * _ODD / 2.0 * predicted
        self._last_oddity = oddity
        self._correct(counts, miss, max(seconds, predicted))
        self._forbid_negatives()
        return share

    def _doubt_all(self, seconds: float) -> None:
        """Keep the weights as guesses: each may be off by itself, or by the whole step."""
        spreads = [max(weight, seconds) ** 2 for weight in self._weights]
        self._covariance = [[spread if i == j else 0.0 for j in range(5)] for i, spread in enumerate(spreads)]

    def _correct(self, counts: Sequence[float], miss: float, seconds: float) -> None:
        """Share the miss out among the weights, the least certain taking the most."""
        covariance, least = self._covariance, (_LEAST_DRIFT * seconds) ** 2
        for i, count in enumerate(counts):
            if count:
                covariance[i][i] += (_DRIFT * self._weights[i]) ** 2 + least
        reach = [_dot(row, counts) for row in covariance]
        total = _dot(reach, counts) + (_NOISE * seconds) ** 2
        for i, row in enumerate(covariance):
            gain = reach[i] / total
            self._weights[i] += gain * miss
            for j in range(5):
                row[j] -= gain * reach[j]
            row[i] = max(row[i], least)  # rounding must not make it certain

    def _forbid_negatives(self) -> None:
        """Lift the lowest weight to 0 while it is below; those that were fitted with it follow."""
        for _ in range(5):
            lowest = min(self._weights)
            if lowest >= 0.0:
                return
            at = self._weights.index(lowest)
            lift = -lowest / self._covariance[at][at]
            self._weights = [
                weight + row[at] * lift for weight, row in zip(self._weights, self._covariance, strict=True)
            ]
            self._weights[at] = 0.0
        self._weights = [max(0.0, weight) for weight in self._weights]


def _count(load: StepLoad) -> tuple[float, ...]:
    """Return what the weights are multiplied with."""
    return (
        1.0,
        load.num_decodes / _ROWS,
        load.num_decode_pairs / _PAIRS,
        load.num_prompt_tokens / _TOKENS,
        load.num_prompt_pairs / _TOKEN_PAIRS,
    )


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    return sum(x * y for x, y in zip(a, b, strict=True))
