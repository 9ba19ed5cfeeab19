"""KeyLimits: how many requests each key has in hand and may still send. Pure: time comes as an argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MAX_KEYS = 10_000


def refill(num_left: float, elapsed_s: float, per_minute: int) -> float:
    """Return what a token bucket holds after some time; it holds a minute's worth at most."""
    return min(float(per_minute), num_left + elapsed_s * per_minute / 60.0)


@dataclass(slots=True)
class _Key:
    """One key.

    Attributes:
        num_in_hand: Its requests that have not been given back.
        num_left: Of its bucket, when it was last looked at.
        looked_at: When that was.
    """

    num_in_hand: int
    num_left: float
    looked_at: float


class KeyLimits:
    """What each key has used up. A key at rest is forgotten, so memory is bounded by the keys in use.

    Args:
        max_keys: So many are remembered; above it only those that have requests in hand.
    """

    def __init__(self, max_keys: int = MAX_KEYS) -> None:
        self._max_keys = max_keys
        self._keys: dict[str, _Key] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def count_in_hand(self, key_id: str) -> int:
        """Return how many requests a key has in hand."""
        key = self._keys.get(key_id)
        return key.num_in_hand if key is not None else 0

    def try_take(self, key_id: str, now: float, *, per_minute: int) -> float:
        """Count one more request in hand, unless the key has sent too many.

        Args:
            key_id: Whose.
            now: Seconds, monotonic.
            per_minute: Requests a minute; 0 = no limit.

        Returns:
            0 if it was counted, else the seconds after which it would be.
        """
        key = self._keys.get(key_id)
        if key is None:
            self._make_room(now, per_minute)
            key = self._keys[key_id] = _Key(0, float(per_minute), now)
        if per_minute:
            key.num_left = refill(key.num_left, now - key.looked_at, per_minute)
            key.looked_at = now
            if key.num_left < 1.0:
                return (1.0 - key.num_left) * 60.0 / per_minute
            key.num_left -= 1.0
        key.num_in_hand += 1
        return 0.0

    def give_back(self, key_id: str, *, per_minute: int) -> None:
        """Count one request less in hand."""
        key = self._keys[key_id]
        key.num_in_hand -= 1
        if not key.num_in_hand and not per_minute:
            del self._keys[key_id]

    def _make_room(self, now: float, per_minute: int) -> None:
        if len(self._keys) < self._max_keys:
            return
        # Whose bucket is full loses nothing by it. If that is not enough, others lose what they have used up.
        self._keep(lambda key: refill(key.num_left, now - key.looked_at, per_minute) < per_minute)
        if len(self._keys) >= self._max_keys:
            self._keep(lambda key: False)

    def _keep(self, is_kept: Callable[[_Key], bool]) -> None:
        self._keys = {key_id: key for key_id, key in self._keys.items() if key.num_in_hand or is_kept(key)}
