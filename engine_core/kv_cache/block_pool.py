"""BlockPool: which KV blocks are free, how many hold the others, and what they contain. Knows no requests, no tensors.

Source: scheduler.md 1.7; the LRU free queue with prefix reuse is vLLM V1's idea, here without block objects.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise


class BlockPool:
    """Reference counts, the free queue and the prefix index over blocks ``1..num_blocks``.

    Block 0 is the null block: never handed out, never free, never cached. Its two links therefore close the free
    queue into a ring, a doubly linked list threaded through two integer lists::

        head = next[0] -> b -> b' -> ... -> tail = prev[0] -> 0

    Taking is from the head. A released block with known content goes to the tail, to be evicted last; one without
    goes to the head, to be overwritten first.

    Attributes:
        num_blocks: Usable blocks.
        num_free: Blocks without an owner.
        ref_counts: Owners per block id.
        digests: Content per block id; None = unknown or not worth keeping.
        index: Digest -> the block that holds it.
        version: Changes whenever the index does.
    """

    __slots__ = ("_next", "_prev", "digests", "index", "num_blocks", "num_free", "ref_counts", "version")

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks >= 1
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.ref_counts = [0] * (num_blocks + 1)
        self.digests: list[bytes | None] = [None] * (num_blocks + 1)
        self.index: dict[bytes, int] = {}
        self.version = 0
        self._next = [*range(1, num_blocks + 1), 0]
        self._prev = [num_blocks, *range(num_blocks)]

    def allocate(self, num_blocks: int) -> list[int]:
        """Take blocks from the head of the free queue and forget what they held. The caller checks ``num_free``."""
        assert num_blocks <= self.num_free, "allocate() past the end of the pool"
        following, ref_counts, digests = self._next, self.ref_counts, self.digests
        taken: list[int] = []
        block = following[0]
        for _ in range(num_blocks):
            taken.append(block)
            ref_counts[block] = 1
            if digests[block] is not None:
                self.forget(block)
            block = following[block]
        following[0] = block
        self._prev[block] = 0
        self.num_free -= num_blocks
        return taken

    def free(self, block_ids: Sequence[int]) -> None:
        """Drop one owner of each block of a table.

        Walks from the last block to the first: of one chain the tail is evicted before the head, without which the
        tail could not be found anyway.
        """
        ref_counts = self.ref_counts
        for block in reversed(block_ids):
            assert ref_counts[block] > 0, f"block {block} freed twice"
            ref_counts[block] -= 1
            if ref_counts[block] == 0:
                self._link(block, at_tail=self.digests[block] is not None)

    def touch(self, block_ids: Sequence[int]) -> None:
        """Add one owner to each block; a free one leaves the free queue, its content kept."""
        ref_counts, following, preceding = self.ref_counts, self._next, self._prev
        num_unlinked = 0
        for block in block_ids:
            if ref_counts[block] == 0:
                before, after = preceding[block], following[block]
                following[before], preceding[after] = after, before
                num_unlinked += 1
            ref_counts[block] += 1
        self.num_free -= num_unlinked

    def register(self, block: int, digest: bytes) -> None:
        """Make an owned block findable by its content.

        A twin in use keeps the entry, and this block stays anonymous: block ids in a table never change. A twin
        without an owner loses it, since this block lives longer.
        """
        assert self.ref_counts[block] > 0 and self.digests[block] is None
        twin = self.index.get(digest)
        if twin is not None:
            if self.ref_counts[twin] > 0:
                return
            self.digests[twin] = None
        self.digests[block] = digest
        self.index[digest] = block
        self.version += 1

    def forget(self, block: int) -> None:
        """Drop what is known of a block's content."""
        digest = self.digests[block]
        if digest is None:
            return
        self.digests[block] = None
        del self.index[digest]
        self.version += 1

    def try_reset_index(self) -> bool:
        """Forget all contents, unless a block is owned. The free queue keeps its order."""
        if self.num_free < self.num_blocks:
            return False
        self.digests = [None] * (self.num_blocks + 1)
        self.index.clear()
        self.version += 1
        return True

    def get_free_order(self) -> list[int]:
        """Return the free blocks, next to be taken first. For tests and checks."""
        order = []
        block = self._next[0]
        while block:
            order.append(block)
            block = self._next[block]
        return order

    def check_invariants(self) -> None:
        """Assert what scheduler.md calls I1, I3, I6 and I7, as far as the pool alone can tell."""
        order = self.get_free_order()
        assert len(order) == self.num_free
        assert sorted(order) == [b for b in range(1, self.num_blocks + 1) if self.ref_counts[b] == 0]
        ring = [0, *order, 0]
        assert all(self._prev[after] == before for before, after in pairwise(ring))
        assert self.ref_counts[0] == 0 and self.digests[0] is None
        known = {digest: block for block, digest in enumerate(self.digests) if digest is not None}
        assert known == self.index

    def _link(self, block: int, *, at_tail: bool) -> None:
        before, after = (self._prev[0], 0) if at_tail else (0, self._next[0])
        self._next[before] = self._prev[after] = block
        self._prev[block], self._next[block] = before, after
        self.num_free += 1
