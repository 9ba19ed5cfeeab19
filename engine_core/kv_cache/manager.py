"""KVCacheManager: block tables of requests. The one writer of their block fields; knows no queues, budgets or time.

Source: scheduler.md 1.5 (A4, A5), 1.6, 1.8 (L).
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence

from engine_core.kv_cache.block_hash import BlockHasher
from engine_core.kv_cache.block_pool import BlockPool
from engine_core.request import Request


class KVCacheManager:
    """Gives requests slots for their tokens, and finds the prefixes that are already there.

    Attributes:
        pool: The blocks.
        block_size: Tokens a block.
        enable_prefix_caching: Off: nothing is hashed, kept or found.
        num_watermark_blocks: Blocks that admission leaves free while anything runs.
        num_reserved_blocks: Blocks promised to the known tokens of partly computed prompts, not taken yet.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        watermark: float = 0.0,
        hash_seed: bytes | None = None,
    ) -> None:
        """Set up an empty cache.

        Args:
            num_blocks: Usable blocks; ids are ``1..num_blocks``, block 0 exists on top of them as the null block.
            block_size: Tokens a block.
            enable_prefix_caching: Reuse the KV of equal prompt prefixes.
            watermark: Share of all blocks, the null block counted, that admission leaves free.
            hash_seed: Where the digest chain starts; None = random, so that nobody outside can aim at a collision.
        """
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_watermark_blocks = int(watermark * (num_blocks + 1))
        self.num_reserved_blocks = 0
        self._hasher = BlockHasher(block_size=block_size, seed=hash_seed or secrets.token_bytes(32))

    @property
    def capacity_tokens(self) -> int:
        """Tokens that an empty pool holds."""
        return self.pool.num_blocks * self.block_size

    def lookup(self, request: Request) -> list[int]:
        """Return the cached blocks that hold the longest known prefix of the request, in order.

        At least the last token is left to compute, since sampling needs its logits. Takes nothing: the blocks may be
        gone after the next allocation. Hashes one block more than it finds, no matter how long the prompt is.
        """
        hits: list[int] = []
        if not self.enable_prefix_caching:
            return hits
        digests, index = request.block_digests, self.pool.index
        for i in range((request.num_tokens - 1) // self.block_size):
            if i == len(digests):
                self._hasher.extend_chain(digests, request.all_token_ids, i + 1)
            block = index.get(digests[i])
            if block is None:
                break
            hits.append(block)
        return hits

    def count_needed_blocks(self, request: Request, num_slots: int, hits: Sequence[int] = ()) -> int:
        """Return how many free blocks a table for ``num_slots`` tokens takes out of the pool.

        A hit that nobody owns is taken out of the free queue as much as a fresh block is.
        """
        num_owned = len(request.block_ids) + len(hits)
        num_fresh = max(0, -(-num_slots // self.block_size) - num_owned)
        ref_counts = self.pool.ref_counts
        return num_fresh + sum(ref_counts[block] == 0 for block in hits)

    def can_admit(self, request: Request, hits: Sequence[int], *, is_alone: bool) -> bool:
        """Tell whether all known tokens of a waiting request fit beside what is running.

        The whole prompt is tested, not its first chunk, and blocks promised to other partly computed prompts count
        as taken: otherwise several long prompts start, none can end, and they preempt each other.

        Args:
            request: Owns no block yet.
            hits: What ``lookup`` found.
            is_alone: Nothing is running, so there is nothing to keep the watermark for.
        """
        num_spare = 0 if is_alone else self.num_watermark_blocks + self.num_reserved_blocks
        return self.count_needed_blocks(request, request.num_tokens, hits) + num_spare <= self.pool.num_free

    def allocate_slots(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int, hits: Sequence[int] = ()
    ) -> list[int] | None:
        """Extend the block table to hold ``num_computed_tokens + num_new_tokens`` tokens.

        Blocks that the new tokens fill are registered at once: nothing that was scheduled is ever withdrawn, so the
        step that writes them is certain to run before any step that could read them, or is the same step.

        Args:
            request: Whose.
            num_computed_tokens: Tokens that have their KV.
            num_new_tokens: Tokens of the next step, all known.
            hits: Cached blocks that start the table; only for a request that owns no block.

        Returns:
            The blocks added to the table, hits included; None, and nothing has changed, if too few are free.
        """
        num_slots = num_computed_tokens + num_new_tokens
        block_ids: list[int] = []
        if hits or num_slots > len(request.block_ids) * self.block_size:
            if self.count_needed_blocks(request, num_slots, hits) > self.pool.num_free:
                return None
            block_ids = self._take_blocks(request, num_slots, hits)
        if self.enable_prefix_caching:
            num_full = num_slots // self.block_size
            if num_full > request.num_registered_blocks:
                self._register(request, num_full)
        return block_ids

    def free(self, request: Request, *, is_suspect: bool = False) -> None:
        """Take all blocks from a request. Cached ones stay findable until they are needed.

        Args:
            request: Whose.
            is_suspect: Its KV may be wrong: what nobody else holds is forgotten.
        """
        if is_suspect:
            for block in request.block_ids:
                if self.pool.ref_counts[block] == 1:
                    self.pool.forget(block)
        self.pool.free(request.block_ids)
        request.block_ids = []
        request.num_registered_blocks = 0
        self._reserve(request, 0)

    def try_reset_prefix_cache(self) -> bool:
        """Forget every cached prefix. Refused (False) while any request owns a block."""
        return self.pool.try_reset_index()

    def check_invariants(self, owners: Sequence[Request]) -> None:
        """Assert what scheduler.md calls I1 to I7, given every request that may own blocks."""
        self.pool.check_invariants()
        counts = Counter(block for request in owners for block in request.block_ids)
        assert all(counts[b] == refs for b, refs in enumerate(self.pool.ref_counts))
        assert sum(request.num_reserved_blocks for request in owners) == self.num_reserved_blocks
        for request in owners:
            table = request.block_ids
            assert 0 not in table and len(set(table)) == len(table)
            assert len(table) == -(-request.num_computed_tokens // self.block_size)
            for i, block in enumerate(table):
                digest = self.pool.digests[block]
                assert counts[block] == 1 or digest is not None, f"shared block {block} has no digest"
                assert digest is None or digest == request.block_digests[i]

    def _take_blocks(self, request: Request, num_slots: int, hits: Sequence[int]) -> list[int]:
        num_fresh = -(-num_slots // self.block_size) - len(request.block_ids) - len(hits)
        # Hits first: the allocation must not evict them.
        self.pool.touch(hits)
        block_ids = [*hits, *self.pool.allocate(num_fresh)]
        request.block_ids += block_ids
        request.num_registered_blocks = max(request.num_registered_blocks, len(hits))
        self._reserve(request, max(0, -(-request.num_tokens // self.block_size) - len(request.block_ids)))
        return block_ids

    def _register(self, request: Request, num_full: int) -> None:
        self._hasher.extend_chain(request.block_digests, request.all_token_ids, num_full)
        for i in range(request.num_registered_blocks, num_full):
            self.pool.register(request.block_ids[i], request.block_digests[i])
        request.num_registered_blocks = num_full

    def _reserve(self, request: Request, num_blocks: int) -> None:
        self.num_reserved_blocks += num_blocks - request.num_reserved_blocks
        request.num_reserved_blocks = num_blocks
