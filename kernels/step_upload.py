"""Puts any step on a device by itself, one small copy an array: for whoever has no block laid out for it."""

from __future__ import annotations

import numpy as np
import torch

from kernels.device_step import CsrPages, StepTensors
from kernels.step import IntArray, StepMeta, without_shared


def upload_step(meta: StepMeta, *, page_size: int, num_shared_pages: int, device: torch.device) -> StepTensors:
    """Return the step on the device, unpadded.

    Args:
        meta: The step. Its arrays may be reused as soon as this returns.
        page_size: Tokens a page.
        num_shared_pages: Leading pages of every table that are attended to once for all; see num_shared_pages().
        device: Where to.
    """

    def put(array: IntArray) -> torch.Tensor:
        return torch.tensor(array, device=device)

    q_lens = np.diff(meta.qo_indptr)
    starts = np.repeat(meta.kv_lens - meta.qo_indptr[1:], q_lens)  # row + this = the row's position in its context
    rows = np.arange(meta.num_tokens, dtype=np.int32)
    qo_indptr_host = torch.tensor(meta.qo_indptr)
    shared_rows = np.array([0, meta.num_tokens], dtype=np.int32)
    return StepTensors(
        num_reqs=meta.num_reqs,
        num_tokens=meta.num_tokens,
        max_q_len=meta.max_q_len,
        qo_indptr_host=qo_indptr_host,
        qo_indptr=put(meta.qo_indptr),
        token_ids=put(meta.token_ids),
        positions=put(meta.positions),
        batch_indices=put(np.repeat(np.arange(meta.num_reqs, dtype=np.int32), q_lens)),
        append_positions=put(rows + starts - np.int32(num_shared_pages * page_size)),
        logit_rows=put(meta.logit_rows),
        pages=_own_pages(meta, num_shared_pages, device),
        shared=_shared_pages(meta, num_shared_pages, page_size, device) if num_shared_pages else None,
        shared_qo_indptr_host=torch.tensor(shared_rows) if num_shared_pages else None,
        shared_qo_indptr=put(shared_rows) if num_shared_pages else None,
    )


def _own_pages(meta: StepMeta, num_shared: int, device: torch.device) -> CsrPages:
    indices, indptr = without_shared(meta, num_shared)
    return _csr(indptr, indices, meta.last_page_len, device)


def _shared_pages(meta: StepMeta, num_shared: int, page_size: int, device: torch.device) -> CsrPages:
    indptr, last_page_len = (np.array(values, dtype=np.int32) for values in ([0, num_shared], [page_size]))
    return _csr(indptr, meta.kv_indices[:num_shared], last_page_len, device)


def _csr(indptr: IntArray, indices: IntArray, last_page_len: IntArray, device: torch.device) -> CsrPages:
    return CsrPages(
        indptr_host=torch.tensor(indptr),
        last_page_len_host=torch.tensor(last_page_len),
        indptr=torch.tensor(indptr, device=device),
        indices=torch.tensor(indices, device=device),
        last_page_len=torch.tensor(last_page_len, device=device),
    )
