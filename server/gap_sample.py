"""GapSample: the median time between a stream's tokens, from a bounded number of them. Pure."""

from __future__ import annotations

# A power of three: each time so many are kept, every third of them stays.
_MAX_KEPT = 243
_THINNING = 3


class GapSample:
    """A sample of the gaps of one stream: all of them at first, then every third, every ninth, and so on.

    By threes, not by twos: where a long prompt shares every second step, long and short gaps alternate, and every
    second gap would tell of one kind only.
    """

    __slots__ = ("_kept", "_num_seen", "_stride")

    def __init__(self) -> None:
        self._kept: list[float] = []
        self._num_seen = 0
        self._stride = 1

    def add(self, gap_s: float) -> None:
        """Take in the next gap. Called once a token."""
        self._num_seen = num_seen = self._num_seen + 1
        if num_seen % self._stride:
            return
        self._kept.append(gap_s)
        if len(self._kept) == _MAX_KEPT:
            self._kept = self._kept[_THINNING - 1 :: _THINNING]
            self._stride *= _THINNING

    def get_median(self) -> float | None:
        """Return the median in seconds, the upper one of two; None where there was no gap."""
        return sorted(self._kept)[len(self._kept) // 2] if self._kept else None
