"""How fast the engine works, and what that means for somebody who has to come back. Pure: time comes as an argument."""

from __future__ import annotations

import math

# What clients are told lies between: sooner is a hammer, and later is a guess.
MIN_RETRY_S, MAX_RETRY_S = 1, 60
_TIME_CONSTANT_S = 30.0


class DrainRate:
    """Tokens a second, prompt and output together, over the recent past. Time in which nothing runs does not count.

    Both sums fade with working time, so that a minute ago weighs little; their quotient is the rate.

    Args:
        time_constant_s: Working time after which a step weighs 1/e of what it did.
    """

    def __init__(self, time_constant_s: float = _TIME_CONSTANT_S) -> None:
        self._time_constant_s = time_constant_s
        self._num_tokens = 0.0
        self._seconds = 0.0

    def add(self, num_tokens: int, duration_s: float) -> None:
        """Add what was done in some working time."""
        kept = math.exp(-duration_s / self._time_constant_s)
        self._num_tokens = self._num_tokens * kept + num_tokens
        self._seconds = self._seconds * kept + duration_s

    @property
    def tokens_per_s(self) -> float:
        """The rate; 0 before anything was measured."""
        return self._num_tokens / self._seconds if self._seconds else 0.0


def compute_retry_after_s(num_tokens: float, tokens_per_s: float) -> int:
    """Return the whole seconds after which to ask again: when the backlog will be gone, as far as one can tell.

    Args:
        num_tokens: Of the backlog, prompts and expected outputs together.
        tokens_per_s: How fast it drains; 0 = not measured yet, hence the server has just begun.
    """
    if tokens_per_s <= 0.0:
        return MIN_RETRY_S
    return bound_retry_after_s(num_tokens / tokens_per_s)


def bound_retry_after_s(seconds: float) -> int:
    """Return a waiting time as it is told: whole seconds, rounded up, within bounds."""
    return min(max(math.ceil(min(seconds, MAX_RETRY_S)), MIN_RETRY_S), MAX_RETRY_S)
