"""RequestQueue: the requests waiting for admission, in order of rank. Knows nothing of why they wait."""

from __future__ import annotations

import heapq

from engine_core.request import Rank, Request

# Below this many dead entries, compaction costs more than it saves.
_MIN_TOMBSTONES = 64


def build_rank(priority: int, seq: int, *, is_higher_first: bool) -> Rank:
    """Return the rank of the ``seq``-th arrival. A policy is nothing but its rank; fcfs is priority 0 for everybody.

    Source: scheduler.md Q1 and amendment 1.
    """
    return (-priority if is_higher_first else priority, seq)


class _Entry:
    """A heap cell. An aborted request leaves its cell behind, empty, until it comes up."""

    __slots__ = ("rank", "request")

    def __init__(self, request: Request) -> None:
        self.rank = request.rank
        self.request: Request | None = request

    def __lt__(self, other: _Entry) -> bool:
        return self.rank < other.rank


class RequestQueue:
    """A priority queue keyed by rank, with removal by id in O(1).

    Place is a property of the rank alone: taking a request out and putting it back cannot damage the order.
    """

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._entries: dict[str, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._entries

    def add(self, request: Request) -> None:
        """Put a request at the place its rank gives it."""
        assert request.request_id not in self._entries
        entry = self._entries[request.request_id] = _Entry(request)
        heapq.heappush(self._heap, entry)

    def peek(self) -> Request | None:
        """Return the first request, or None."""
        while self._heap:
            request = self._heap[0].request
            if request is not None:
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Request:
        """Take out the first request.

        Raises:
            IndexError: The queue is empty.
        """
        request = self.peek()
        if request is None:
            raise IndexError("pop from an empty queue")
        heapq.heappop(self._heap)
        del self._entries[request.request_id]
        return request

    def remove(self, request: Request) -> None:
        """Take out a request, wherever it stands."""
        self._entries.pop(request.request_id).request = None
        num_dead = len(self._heap) - len(self._entries)
        if num_dead > max(_MIN_TOMBSTONES, len(self._entries)):
            self._heap = sorted(self._entries.values())

    def get_first(self, limit: int) -> list[Request]:
        """Return the first requests, ``limit`` at most, in order. Costs by the limit, not by the queue's length."""
        # A heap of heap cells whose parents have been seen: the next in order is always among them.
        found: list[Request] = []
        heap = self._heap
        seen = [(heap[0].rank, 0)] if heap else []
        while seen and len(found) < limit:
            _, index = heapq.heappop(seen)
            request = heap[index].request
            if request is not None:
                found.append(request)
            for child in range(2 * index + 1, min(2 * index + 3, len(heap))):
                heapq.heappush(seen, (heap[child].rank, child))
        return found
