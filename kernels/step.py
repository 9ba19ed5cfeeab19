"""What one forward step is made of: the ragged batch, the pages, and each layer's attention. No imports of ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

Activation = Literal["silu", "gelu_tanh"]
IntArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttnSpec:
    """What distinguishes one kind of attention layer from another.

    Attributes:
        num_q_heads: Query heads; a multiple of ``num_kv_heads`` (grouped-query attention).
        num_kv_heads: Key and value heads.
        head_dim: Width of one head.
        sm_scale: Factor on q·k before the softmax.
        window_left: Tokens visible to the left of the query, itself not counted; -1 = all (FlashInfer's meaning).
        soft_cap: ``cap * tanh(score / cap)`` on the scaled scores; 0 = off.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    sm_scale: float
    window_left: int = -1
    soft_cap: float = 0.0


@dataclass(slots=True)
class StepMeta:
    """One forward step over a ragged batch, in host int32 arrays. ``B`` requests, ``T`` tokens.

    Request ``i`` owns the tokens ``qo_indptr[i]:qo_indptr[i+1]`` and the pages
    ``kv_indices[kv_indptr[i]:kv_indptr[i+1]]``; its queries are the last ``q_len`` of its ``kv_lens[i]`` tokens::

        pages of request i   [ p0 | p1 | p2 ]          kv_len = (3 - 1) * page_size + last_page_len
        tokens                ......qqqq               q_len = 4, positions kv_len-4 .. kv_len-1

    Attributes:
        num_reqs: B. Requests with one query token (decodes) come first.
        num_tokens: T.
        num_decodes: How many of the first requests have ``q_len == 1``.
        max_q_len: Longest query of the batch.
        max_kv_len: Longest context of the batch.
        qo_indptr: [B+1], token units.
        kv_indptr: [B+1], page units.
        kv_indices: [kv_indptr[-1]], page ids.
        last_page_len: [B], 1..page_size.
        kv_lens: [B], tokens including this step's.
        token_ids: [T].
        positions: [T].
        slot_mapping: [T], ``page * page_size + offset`` where this token's K and V go.
        logit_rows: [R], token rows whose logits are wanted.
        num_common_pages: Leading pages that all requests share, computed before this step; a hint, 0 is always right.
    """

    num_reqs: int
    num_tokens: int
    num_decodes: int
    max_q_len: int
    max_kv_len: int
    qo_indptr: IntArray
    kv_indptr: IntArray
    kv_indices: IntArray
    last_page_len: IntArray
    kv_lens: IntArray
    token_ids: IntArray
    positions: IntArray
    slot_mapping: IntArray
    logit_rows: IntArray
    num_common_pages: int = 0


def without_shared(meta: StepMeta, num_shared_pages: int) -> tuple[IntArray, IntArray]:
    """Return a step's page indices and their bounds without the first pages of every request.

    Shared pages stand once in each table, so each bound moves by as many as there are tables before it.
    """
    stays = np.ones(len(meta.kv_indices), np.bool_)
    stays[(meta.kv_indptr[:-1, None] + np.arange(num_shared_pages, dtype=np.int32)).ravel()] = False
    bounds = meta.kv_indptr - np.arange(meta.num_reqs + 1, dtype=np.int32) * np.int32(num_shared_pages)
    return meta.kv_indices[stays], bounds


class KVPool(Protocol):
    """Pages of K and V for every layer. Opaque: the layout belongs to the backend, callers know only page ids."""

    page_size: int
    num_pages: int
    page_bytes: int  # one page over all layers, K and V

    def copy_pages(self, src: IntArray, dst: IntArray) -> None:
        """Copy whole pages, all layers. ``src`` and ``dst``: [n] page ids, disjoint."""

    def read_page(self, page: int, out: memoryview) -> None:
        """Write one page's native bytes into ``out`` (``page_bytes`` long)."""

    def write_page(self, page: int, data: memoryview) -> None:
        """Fill one page from bytes that ``read_page`` of the same kind of pool gave."""
