"""The memory of decode steps of one batch size, refilled in place as a runner does for its graphs."""

from __future__ import annotations

from dataclasses import replace

import torch

from kernels.device_step import CsrPages, StepTensors
from kernels.step import StepMeta
from kernels.step_upload import upload_step

CPU = torch.device("cpu")


class GraphStep:
    """Decode steps padded to ``size`` requests, whose page tables have ``room`` for so many pages in all."""

    def __init__(self, size: int, *, page_size: int, room: int, shared_room: int = 0) -> None:
        self._page_size = page_size
        self._shared_room = shared_room
        rows = torch.arange(size + 1, dtype=torch.int32)
        words = torch.zeros(size, dtype=torch.int32)
        self._step = StepTensors(
            num_reqs=size,
            num_tokens=size,
            max_q_len=1,
            qo_indptr_host=rows,
            qo_indptr=rows.clone(),
            token_ids=words.clone(),
            positions=words.clone(),
            batch_indices=rows[:size].clone(),
            append_positions=words.clone(),
            logit_rows=rows[:size].clone(),
            pages=_room(size, room),
            shared=_room(1, shared_room) if shared_room else None,
            shared_qo_indptr_host=torch.tensor([0, size], dtype=torch.int32) if shared_room else None,
            shared_qo_indptr=torch.tensor([0, size], dtype=torch.int32) if shared_room else None,
        )

    def fill(self, meta: StepMeta, num_shared_pages: int = 0) -> StepTensors:
        """Bring a step into the memory; what lies on the host is new each time."""
        assert (num_shared_pages > 0) == (self._shared_room > 0)
        step = upload_step(meta, page_size=self._page_size, num_shared_pages=num_shared_pages, device=CPU)
        num_added = self._step.num_reqs - meta.num_reqs
        zeros, ones = (torch.full((num_added,), value, dtype=torch.int32) for value in (0, 1))
        self._step.positions.copy_(torch.cat((step.positions, zeros)))
        self._step.append_positions.copy_(torch.cat((step.append_positions, zeros)))
        own = step.pages
        more = own.indptr[-1] + torch.arange(1, num_added + 1, dtype=torch.int32)
        pages = _refilled(
            self._step.pages,
            torch.cat((own.indptr, more)),
            torch.cat((own.indices, zeros)),
            torch.cat((own.last_page_len, ones)),
        )
        if step.shared is None or self._step.shared is None:
            return replace(self._step, pages=pages)
        shared = _refilled(self._step.shared, step.shared.indptr, step.shared.indices, step.shared.last_page_len)
        return replace(self._step, pages=pages, shared=shared)


def _room(num_reqs: int, num_pages: int) -> CsrPages:
    indptr, indices, last = (torch.zeros(length, dtype=torch.int32) for length in (num_reqs + 1, num_pages, num_reqs))
    return CsrPages(indptr.clone(), last.clone(), indptr, indices, last)


def _refilled(room: CsrPages, indptr: torch.Tensor, indices: torch.Tensor, last_page_len: torch.Tensor) -> CsrPages:
    room.indptr.copy_(indptr)
    room.indices[: len(indices)].copy_(indices)
    room.last_page_len.copy_(last_page_len)
    return replace(room, indptr_host=indptr.clone(), last_page_len_host=last_page_len.clone())
