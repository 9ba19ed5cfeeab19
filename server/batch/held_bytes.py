"""How many bytes a batch may hold at once. Knows neither lines nor answers."""

from __future__ import annotations

import asyncio


class HeldBytes:
    """Counts what is held; one task may wait for room. What is larger than all of it waits until nothing else is held.

    Args:
        max_bytes: The room.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._has_changed = asyncio.Event()

    async def take(self, num_bytes: int) -> None:
        """Hold this many bytes more, as soon as there is room."""
        while self._num_bytes and self._num_bytes + num_bytes > self._max_bytes:
            self._has_changed.clear()
            await self._has_changed.wait()
        self._num_bytes += num_bytes

    def exchange(self, old_bytes: int, new_bytes: int) -> None:
        """Hold ``new_bytes`` for ``old_bytes`` at once, even if that is more than there is room for."""
        self._num_bytes += new_bytes - old_bytes
        self._has_changed.set()
