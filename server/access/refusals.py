"""What is done about requests that may not come in: each is counted, and the log hears of them now and then.

Somebody who tries keys, or a client with an old one, must show in the log, and must not fill it.
"""

from __future__ import annotations

import enum
import logging
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from starlette.types import Scope

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 10.0


class Refusal(enum.StrEnum):
    """Why a request did not come in: the label of its metric."""

    NO_KEY = "no_key"
    UNKNOWN_KEY = "unknown_key"
    SCOPE = "scope"
    HOST = "host"
    ORIGIN = "origin"


_WORDS = {
    Refusal.NO_KEY: "without a key",
    Refusal.UNKNOWN_KEY: "with an unknown key",
    Refusal.SCOPE: "with a key that does not open what was asked for",
    Refusal.HOST: "for another host",
    Refusal.ORIGIN: "from another site's page",
}


class AccessMetrics(Protocol):
    """The metrics that refusals feed."""

    def count_access_refusal(self, reason: str) -> None:
        """Count a request that did not come in."""


class AccessRefusals:
    """Counts refusals and logs them, at most one line in ``_LOG_INTERVAL_S``.

    Args:
        metrics: Told of each.
        clock: Seconds, monotonic.
    """

    def __init__(self, metrics: AccessMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._metrics = metrics
        self._clock = clock
        self._num_unlogged: Counter[Refusal] = Counter()
        self._next_line_time = float("-inf")

    def note(self, refusal: Refusal, scope: Scope) -> None:
        """Take note of one.

        Args:
            refusal: Why.
            scope: The request's. Only the peer's address is taken from it: nothing that the client wrote.
        """
        self._metrics.count_access_refusal(refusal)
        self._num_unlogged[refusal] += 1
        now = self._clock()
        if now < self._next_line_time:
            return
        self._next_line_time = now + _LOG_INTERVAL_S
        told = ", ".join(f"{count} {_WORDS[each]}" for each, count in self._num_unlogged.items())
        self._num_unlogged.clear()
        client = scope.get("client")
        logger.warning("requests refused: %s; the last from %s", told, client[0] if client else "an unknown address")
