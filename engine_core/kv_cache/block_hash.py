"""Names for the content of full KV blocks: a chain of digests, each standing for all tokens up to its end. Pure."""

from __future__ import annotations

import hashlib
import itertools
import struct
from collections import deque
from collections.abc import Iterator, Sequence
from itertools import islice

# Tokens are packed so many blocks at a time: few calls for a long prompt, little waste where the first block misses.
_STRIDE_BLOCKS = 32


class BlockHasher:
    """Digests of full blocks, chained so that equal digests mean equal prefixes.

    ``h[i] = sha256(h[i-1] | tokens of block i as int32, little endian)``; ``h[-1]`` comes from the seed, and from the
    request's salt where it has one. Both parts have fixed lengths, so no two inputs collide by running into each other.

    Source: scheduler.md K1, K2.
    """

    def __init__(self, *, block_size: int, seed: bytes) -> None:
        self.block_size = block_size
        self.root = hashlib.sha256(seed).digest()

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
        parent = chain[-1] if chain else self._salted_root(salt)
        for first in range(len(chain), num_blocks, _STRIDE_BLOCKS):
            raw = _pack(token_ids[first * size : min(first + _STRIDE_BLOCKS, num_blocks) * size])
            for start in range(0, len(raw), 4 * size):
                parent = sha256(parent + raw[start : start + 4 * size]).digest()
                chain.append(parent)
                yield parent

    def _salted_root(self, salt: str) -> bytes:
        return hashlib.sha256(self.root + salt.encode("utf-8", "surrogatepass")).digest() if salt else self.root


def _pack(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}i", *token_ids)
