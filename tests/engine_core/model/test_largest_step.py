"""The step that a card's memory is measured with: well formed, and as large as requests can make it."""

from __future__ import annotations

import numpy as np
import pytest

from engine_core.model.largest_step import build_largest_step


@pytest.mark.parametrize(
    ("tokens", "requests", "longest", "expected"),
    [(100, 8, 50, (8, 100)), (64, 8, 4, (8, 32)), (8, 8, 50, (8, 8)), (5, 8, 50, (5, 5)), (40, 1, 50, (1, 40))],
)
def test_every_page_is_one_requests_and_every_request_wants_logits(
    tokens: int, requests: int, longest: int, expected: tuple[int, int]
) -> None:
    meta = build_largest_step(max_num_batched_tokens=tokens, max_num_seqs=requests, max_model_len=longest, page_size=4)
    assert (meta.num_reqs, meta.num_tokens) == expected
    assert meta.max_kv_len <= longest and len(meta.logit_rows) == meta.num_reqs
    assert sorted(meta.kv_indices.tolist()) == list(range(1, len(meta.kv_indices) + 1)), "page 0 is nobody's"
    lengths = np.diff(meta.qo_indptr)
    assert lengths.max() - lengths.min() <= 1 and lengths.tolist() == meta.kv_lens.tolist()
    assert (lengths[: meta.num_decodes] == 1).all() and (lengths[meta.num_decodes :] > 1).all()
    slots = []
    for i, length in enumerate(lengths.tolist()):
        pages = meta.kv_indices[meta.kv_indptr[i] : meta.kv_indptr[i + 1]]
        assert (len(pages) - 1) * 4 + meta.last_page_len[i] == length
        slots += [int(pages[position // 4]) * 4 + position % 4 for position in range(length)]
        rows = slice(meta.qo_indptr[i], meta.qo_indptr[i + 1])
        assert meta.positions[rows].tolist() == list(range(length)) and meta.logit_rows[i] == rows.stop - 1
    assert meta.slot_mapping.tolist() == slots
    arrays = (meta.qo_indptr, meta.kv_indptr, meta.kv_indices, meta.last_page_len, meta.positions, meta.slot_mapping)
    assert all(array.dtype == np.int32 for array in (*arrays, meta.kv_lens, meta.token_ids, meta.logit_rows))
