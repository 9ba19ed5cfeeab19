"""A decoder whose whole step is one call into the kernels. Knows rotary tables and memory limits, no arithmetic."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from engine_core.model.arch import ArchSpec
from engine_core.model.decoder import MAX_LOGITS_BYTES, CosSinTable
from kernels.backend import KVPool, StepMeta
from kernels.fused import FusedModel, HeadRows


class FusedDecoder:
    """A loaded model; a LanguageModel.

    Args:
        arch: What it is.
        model: Packed from its weights.

    Attributes:
        arch: As given.
        weights_bytes: Memory that the weights take.
    """

    def __init__(self, arch: ArchSpec, model: FusedModel) -> None:
        self.arch = arch
        self.weights_bytes = model.num_bytes
        self._model = model
        ropes = (arch.rope,) if arch.local_rope is None else (arch.rope, arch.local_rope)
        self._tables = [CosSinTable(rope, arch.head_dim) for rope in ropes]
        for index, table in enumerate(self._tables):
            model.set_rope(index, table.values.numpy())

    def kv_page_bytes(self, page_size: int) -> int:
        """Return the bytes of one page over all layers, without allocating."""
        return self._model.kv_page_bytes(page_size)

    def alloc_kv(self, *, num_pages: int, page_size: int) -> KVPool:
        """Allocate pages for all layers."""
        return self._model.alloc_kv(num_pages=num_pages, page_size=page_size)

    def compute(
        self, meta: StepMeta, kv: KVPool, *, needs_logits: NDArray[np.bool_], num_token_ids: int
    ) -> Iterator[HeadRows]:
        """Compute one step; see LanguageModel."""
        for index, table in enumerate(self._tables):
            if table.grow(meta.max_kv_len):
                self._model.set_rope(index, table.values.numpy())
        self._model.forward(meta, kv)
        num_rows = len(meta.logit_rows)
        max_rows = max(1, MAX_LOGITS_BYTES // (4 * self.arch.vocab_size)) if needs_logits.any() else max(1, num_rows)
        for first in range(0, num_rows, max_rows):
            num = min(max_rows, num_rows - first)
            # The head is read for all rows at once: one row's wish costs the others a store, a second pass far more.
            wants = bool(needs_logits[first : first + num].any())
            yield self._model.head(first, num, num_token_ids, wants)
