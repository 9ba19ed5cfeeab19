"""The largest step that a config allows, made up: what a card's memory is measured with before there are requests."""

from __future__ import annotations

import numpy as np

from kernels.backend import StepMeta


def build_largest_step(
    *, max_num_batched_tokens: int, max_num_seqs: int, max_model_len: int, page_size: int
) -> StepMeta:
    """Return a step of new prompts, as even as can be, each wanting logits. Page 0 is nobody's.

    Args:
        max_num_batched_tokens: Tokens of the step, as far as the requests hold them.
        max_num_seqs: Requests.
        max_model_len: Tokens of a request at most.
        page_size: Tokens a page.
    """
    num_reqs = min(max_num_seqs, max_num_batched_tokens)
    num_tokens = min(max_num_batched_tokens, num_reqs * max_model_len)
    lengths = np.full(num_reqs, num_tokens // num_reqs, np.int32)
    # The shorter ones first: requests of one token, as decodes are, come before the others.
    lengths[num_reqs - num_tokens % num_reqs :] += 1
    num_pages = -(-lengths // page_size)
    qo_indptr, kv_indptr = _bounds(lengths), _bounds(num_pages)
    positions = np.arange(num_tokens, dtype=np.int32) - np.repeat(qo_indptr[:-1], lengths)
    first_slots = (1 + kv_indptr[:-1]) * page_size
    return StepMeta(
        num_reqs=num_reqs,
        num_tokens=num_tokens,
        num_decodes=int((lengths == 1).sum()),
        max_q_len=int(lengths.max()),
        max_kv_len=int(lengths.max()),
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=np.arange(1, 1 + kv_indptr[-1], dtype=np.int32),
        last_page_len=(lengths - 1) % np.int32(page_size) + np.int32(1),
        kv_lens=lengths,
        token_ids=np.zeros(num_tokens, np.int32),
        positions=positions.astype(np.int32),
        slot_mapping=(np.repeat(first_slots, lengths) + positions).astype(np.int32),
        logit_rows=qo_indptr[1:] - np.int32(1),
    )


def _bounds(lengths: np.ndarray[tuple[int], np.dtype[np.int32]]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
