"""Names for the content of full KV blocks: a chain of digests, each standing for all tokens up to its end. Pure."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence


class BlockHasher:
    """Digests of full blocks, chained so that equal digests mean equal prefixes.

    ``h[i] = sha256(h[i-1] | tokens of block i as int32, little endian | extra)``; ``h[-1]`` comes from the seed. The
    first two parts have fixed lengths, so no two inputs collide by running into each other.

    Source: scheduler.md K1, K2.
    """

    def __init__(self, *, block_size: int, seed: bytes) -> None:
        self.block_size = block_size
        self.root = hashlib.sha256(seed).digest()
        self._pack = struct.Struct(f"<{block_size}i").pack

    def digest(self, parent: bytes, token_ids: Sequence[int], extra: bytes = b"") -> bytes:
        """Return the digest of one block.

        Args:
            parent: Digest of the block before it, or ``root``.
            token_ids: [block_size] ids.
            extra: Whatever else decides the block's KV besides its tokens (an adapter, an image), canonically encoded.
        """
        return hashlib.sha256(parent + self._pack(*token_ids) + extra).digest()

    def extend_chain(self, chain: list[bytes], token_ids: Sequence[int], num_blocks: int) -> None:
        """Grow ``chain`` in place until it names the first ``num_blocks`` blocks of ``token_ids``."""
        size = self.block_size
        parent = chain[-1] if chain else self.root
        for start in range(len(chain) * size, num_blocks * size, size):
            parent = self.digest(parent, token_ids[start : start + size])
            chain.append(parent)
