"""KVCacheManager: block tables of requests. The one writer of their block fields; knows no queues, budgets or time.

Source: scheduler.md 1.5 (A4, A5), 1.6, 1.8 (L).
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from engine_core.kv_cache.block_hash import BlockHasher
from engine_core.kv_cache.block_pool import BlockPool
from engine_core.request import Request


@dataclass(frozen=True, slots=True)
class _Lookup:
    """A lookup's result, and what it depends on."""

    request: Request
    num_tokens: int
    pool_version: int
    hits: list[int]

    def is_valid_for(self, request: Request, pool_version: int) -> bool:
        return self.request is request and self.num_tokens == request.num_tokens and self.pool_version == pool_version


class KVCacheManager:
    """Gives requests slots for their tokens, and finds the prefixes that are already there.

    Attributes:
        pool: The blocks.
        block_size: Tokens a block.
        enable_prefix_caching: Off: nothing is hashed, kept or found.
        num_watermark_blocks: Blocks that admission leaves free while anything runs.
        num_reserved_blocks: Blocks promised to the known tokens of partly computed prompts, not taken yet.
        full_prompt_gate: Admit a request only if all its known tokens fit, not just its first chunk.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        watermark: float = 0.0,
        full_prompt_gate: bool = True,
        hash_seed: bytes | None = None,
    ) -> None:
        """Set up an empty cache.

        Args:
            num_blocks: Usable blocks; ids are ``1..num_blocks``, block 0 exists on top of them as the null block.
            block_size: Tokens a block.
            enable_prefix_caching: Reuse the KV of equal prompt prefixes.
            watermark: Share of all blocks, the null block counted, that admission leaves free.
            full_prompt_gate: Off: the first chunk alone decides, and long prompts may start that cannot end together.
            hash_seed: Where the digest chain starts; None = random, so that nobody outside can aim at a collision.
        """
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.enable_prefix_caching = enable_prefix_caching
        self.num_watermark_blocks = int(watermark * (num_blocks + 1))
        self.num_reserved_blocks = 0
        self.full_prompt_gate = full_prompt_gate
        self._hasher = BlockHasher(block_size=block_size, seed=hash_seed or secrets.token_bytes(32))
        self._last_lookup: _Lookup | None = None

    @property
    def capacity_tokens(self) -> int:
        """Tokens that an empty pool holds."""
        return self.pool.num_blocks * self.block_size

    def lookup(self, request: Request) -> Sequence[int]:
        """Return the cached blocks that hold the longest known prefix of the request, in order.

        At least the last token is left to compute, since sampling needs its logits. Takes nothing: the blocks may be
        gone after the next allocation. Hashes one block more than it finds, no matter how long the prompt is; asked
        again by a request that could not be admitted, it remembers, unless blocks came or went.
        """
        if not self.enable_prefix_caching or request.skip_reading_prefix_cache:
            return ()
        last = self._last_lookup
        if last is None or not last.is_valid_for(request, self.pool.version):
            last = self._last_lookup = _Lookup(request, request.num_tokens, self.pool.version, self._find(request))
        return last.hits

    def _find(self, request: Request) -> list[int]:
        hits: list[int] = []
        get_block = self.pool.index.get
        num_blocks = (request.num_tokens - 1) // self.block_size
        for digest in self._hasher.iter_chain(
            request.block_digests, request.all_token_ids, num_blocks, request.cache_salt
        ):
            block = get_block(digest)
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
        return num_fresh + [ref_counts[block] for block in hits].count(0)

    def count_missing_blocks(
        self,
        request: Request,
        hits: Sequence[int],
        num_new_tokens: int,
        *,
        is_alone: bool,
        without: Sequence[Request] = (),
    ) -> int:
        """Return how many more free blocks the admission of a waiting request takes than there are; <= 0: it fits.

        The whole prompt is tested, not its first chunk, and blocks promised to other partly computed prompts count
        as taken: otherwise several long prompts start, none can end, and they preempt each other.

        Args:
            request: Owns no block yet.
            hits: What ``lookup`` found.
            num_new_tokens: Its first chunk.
            is_alone: Nothing else is running, so there is nothing to keep the watermark for.
            without: Running requests that are thought to have given all their blocks back.
        """
        num_slots, num_reserved = request.num_tokens, self.num_reserved_blocks
        num_reserved -= sum(other.num_reserved_blocks for other in without)
        if not self.full_prompt_gate:
            num_slots, num_reserved = len(hits) * self.block_size + num_new_tokens, 0
        num_spare = 0 if is_alone else self.num_watermark_blocks + num_reserved
        num_free = self.pool.num_free + sum(self.count_exclusive_blocks(other, hits) for other in without)
        return self.count_needed_blocks(request, num_slots, hits) + num_spare - num_free

    def count_exclusive_blocks(self, request: Request, but: Sequence[int] = ()) -> int:
        """Return how many of a request's blocks, ``but`` for those, nobody else holds: what taking them sets free."""
        ref_counts, kept = self.pool.ref_counts, set(but)
        return sum(ref_counts[block] == 1 for block in request.block_ids if block not in kept)

    def allocate_slots(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int, hits: Sequence[int] = ()
    ) -> list[int] | None:
        """Extend the block table to hold ``num_computed_tokens + num_new_tokens`` tokens.

        Args:
            request: Whose.
            num_computed_tokens: Tokens that have their KV.
            num_new_tokens: Tokens of the next step.
            hits: Cached blocks that start the table; only for a request that owns no block.

        Returns:
            The blocks added to the table, hits included; None, and nothing has changed, if too few are free.
        """
        num_slots = num_computed_tokens + num_new_tokens
        block_ids: list[int] = []
        if hits or num_slots > request.num_slots:
            if self.count_needed_blocks(request, num_slots, hits) > self.pool.num_free:
                return None
            block_ids = self._take_blocks(request, num_slots, hits)
        return block_ids

    def try_add_block(self, request: Request) -> int | None:
        """Give a decoding request its next block; None if none is free. ``allocate_slots`` for the commonest case."""
        if not self.pool.num_free:
            return None
        (block,) = self.pool.allocate(1)
        request.block_ids.append(block)
        request.num_slots += self.block_size
        return block

    def register_full_blocks(self, request: Request, num_tokens: int) -> None:
        """Let others find the blocks that the first ``num_tokens`` tokens of the request fill.

        That may be when their step is scheduled: nothing scheduled is ever withdrawn, so the step that writes them is
        certain to run before any step that could read them, or is the same step.

        Args:
            request: Whose.
            num_tokens: Tokens that are known, and computed or scheduled to be; no drafts.
        """
        num_full = num_tokens // self.block_size
        first = request.num_registered_blocks
        if num_full <= first or not self.enable_prefix_caching:
            return
        self._hasher.extend_chain(request.block_digests, request.all_token_ids, num_full, request.cache_salt)
        block_ids, digests, register = request.block_ids, request.block_digests, self.pool.register
        for index in range(first, num_full):
            register(block_ids[index], digests[index])
        request.num_registered_blocks = num_full

    def forget_suspect(self, request: Request) -> None:
        """Forget what the request's KV holds, as it may be wrong, where nobody else holds it too.

        By content, not by block: the request may have lost its blocks while the step ran that went wrong.
        """
        own = set(request.block_ids)
        for digest in request.block_digests:
            block = self.pool.index.get(digest)
            if block is not None and self.pool.ref_counts[block] == (block in own):
                self.pool.forget(block)

    def free(self, request: Request) -> None:
        """Take all blocks from a request. Cached ones stay findable until they are needed."""
        self.pool.free(request.block_ids)
        request.block_ids = []
        request.num_slots = request.num_registered_blocks = 0
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
            # Rejected drafts leave their blocks; nobody ever owns one past its end.
            assert request.num_computed_tokens <= request.num_slots == len(table) * self.block_size
            assert len(table) <= -(-(request.max_total_tokens - 1) // self.block_size)
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
        request.num_slots = len(request.block_ids) * self.block_size
        request.num_registered_blocks = max(request.num_registered_blocks, len(hits))
        self._reserve(request, max(0, -(-request.num_tokens // self.block_size) - len(request.block_ids)))
        return block_ids

    def _reserve(self, request: Request, num_blocks: int) -> None:
        self.num_reserved_blocks += num_blocks - request.num_reserved_blocks
        request.num_reserved_blocks = num_blocks
