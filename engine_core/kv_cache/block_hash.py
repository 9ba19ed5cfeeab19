"""Names for the content of full KV blocks: a chain of digests, each standing for all tokens up to its end. Pure."""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

# Tokens are packed, and digests remembered, by runs of so many blocks: few calls for a long prompt, little waste where
# the first block misses.
_RUN_BLOCKS = 8
_MAX_REMEMBERED_TOKENS = 1 << 20


class BlockHasher:
    """Digests of full blocks, chained so that equal digests mean equal prefixes.

    ``h[i] = sha256(h[i-1] | tokens of block i as int32, little endian)``; ``h[-1]`` comes from the seed, and from the
    request's salt where it has one. Both parts have fixed lengths, so no two inputs collide by running into each other;
    a salt stands behind a root of its own, so that a client cannot write one that reads like a block of tokens.

    Remembers the digests of recent runs of blocks by all that goes into them: a prefix that comes again, the usual case
    of a cached one, is compared instead of hashed.

    Source: scheduler.md K1, K2.
    """

    def __init__(self, *, block_size: int, seed: bytes) -> None:
        self.block_size = block_size
        self.root = hashlib.sha256(seed).digest()
        self._salted_root = hashlib.sha256(b"salt" + self.root).digest()
        self._runs: dict[bytes, list[bytes]] = {}
        self._max_runs = max(1, _MAX_REMEMBERED_TOKENS // (_RUN_BLOCKS * block_size))

    def iter_chain(
        self, chain: list[bytes], token_ids: Sequence[int], num_blocks: int, salt: str = ""
    ) -> Iterator[bytes]:
        """Iterate over the digests of the first ``num_blocks`` blocks; what ``chain`` lacks is computed when reached.

        Args:
            chain: Digests of the first blocks, as far as they are known; grows in place.
            token_ids: At least ``num_blocks * block_size`` ids.
            num_blocks: Full blocks.
            salt: Always the same for one chain.
        """
        known = islice(chain, min(len(chain), num_blocks))
        return itertools.chain(known, self._iter_new(chain, token_ids, num_blocks, salt))

    def extend_chain(self, chain: list[bytes], token_ids: Sequence[int], num_blocks: int, salt: str = "") -> None:
        """Grow ``chain`` in place until it names the first ``num_blocks`` blocks of ``token_ids``."""
        deque(self._iter_new(chain, token_ids, num_blocks, salt), maxlen=0)

    def _iter_new(self, chain: list[bytes], token_ids: Sequence[int], num_blocks: int, salt: str) -> Iterator[bytes]:
        size, sha256 = self.block_size, hashlib.sha256
        assert num_blocks * size <= len(token_ids), "only full blocks have digests"
        first = len(chain)
        while first < num_blocks:
            # To the end of an aligned run if the tokens reach so far, even where fewer are asked for.
            last = min(first - first % _RUN_BLOCKS + _RUN_BLOCKS, len(token_ids) // size)
            raw = _pack(token_ids[first * size : last * size])
            parent = self._get_parent(chain, first, salt)
            key = parent + raw
            run = self._runs.get(key)
            if run is not None:
                chain += run
                yield from run[: num_blocks - first]
            else:
                for start in range(0, 4 * size * (min(last, num_blocks) - first), 4 * size):
                    parent = sha256(parent + raw[start : start + 4 * size]).digest()
                    chain.append(parent)
                    yield parent
                if len(chain) % _RUN_BLOCKS == 0:
                    if first % _RUN_BLOCKS:  # begun in the middle: by a lookup that missed, or by output tokens
                        first = last - _RUN_BLOCKS
                        key = self._get_parent(chain, first, salt) + _pack(token_ids[first * size : last * size])
                    self._remember(key, chain[first:last])
            first = last

    def _remember(self, key: bytes, run: list[bytes]) -> None:
        if len(self._runs) >= self._max_runs:
            del self._runs[next(iter(self._runs))]  # the oldest
        self._runs[key] = run

    def _get_parent(self, chain: list[bytes], block: int, salt: str) -> bytes:
        if block:
            return chain[block - 1]
        return hashlib.sha256(self._salted_root + salt.encode("utf-8", "surrogatepass")).digest() if salt else self.root


def _pack(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}i", *token_ids)
