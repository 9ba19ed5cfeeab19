"""StepBlock: one step's arrays in one block, laid out on the host and brought to the device by one copy.

A device block and two pinned ones, used in turn: while the device still reads what one brought, the next step is laid
out in the other. Knows a step and its pages; knows nothing of requests or sampling.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from kernels.accelerator import Accelerator, Event
from kernels.device_step import CsrPages, StepTensors
from kernels.step import IntArray, StepMeta, without_shared
from kernels.step_layout import ALIGNMENT, Layouts, Sections, StepShape


class LoadedStep(NamedTuple):
    """A step on its way to the device.

    Attributes:
        tensors: For the backend and the decoder.
        records: [R, num_columns] int32 on the device: what the caller gave with each logit row.
    """

    tensors: StepTensors
    records: torch.Tensor


@dataclass(slots=True)
class _PinnedBlock:
    """One of the two.

    Attributes:
        tensor: [num_words] int32, page-locked.
        words: The same memory for numpy.
        upload: Ends the last copy that read it; None = it has ended.
        load_id: Which step lies in it.
        views: Steps of a graph, by shape: they look the same every time.
    """

    tensor: torch.Tensor
    words: IntArray
    upload: Event | None = None
    load_id: int = 0
    views: dict[StepShape, LoadedStep] = field(default_factory=dict)


class StepBlock:
    """Lays steps out and brings them to the device.

    Sections, each at a multiple of 16 bytes; for one shape of step always at the same place::

        qo_indptr | kv_indptr | last_page_len | token_ids | positions | batch_indices | append_positions | logit_rows
        | records | shared qo_indptr, kv_indptr, last_page_len, indices | indices ...... (copied as far as it is used)

    Args:
        accelerator: Copies.
        page_size: Tokens a page.
        max_num_reqs: Requests a step at most, with padding.
        max_num_tokens: Tokens a step at most; a graph's padding may exceed it.
        max_model_len: Tokens of one request at most.
        num_columns: Words that the caller gives with each logit row.

    Attributes:
        max_pages: Page indices that one request may have.
        load_id: Counts the steps: which one was loaded last.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        *,
        page_size: int,
        max_num_reqs: int,
        max_num_tokens: int,
        max_model_len: int,
        num_columns: int,
    ) -> None:
        self._accelerator = accelerator
        self._page_size = page_size
        self._num_columns = num_columns
        self.max_pages = -(-max_model_len // page_size) + 1
        self.load_id = 0
        self._layouts = Layouts(num_columns, self.max_pages)
        num_tokens = max(max_num_tokens, max_num_reqs)
        widest = StepShape(max_num_reqs, num_tokens, num_tokens, has_shared=True, is_padded=True)
        num_words = self._layouts.find(widest).indices + max_num_reqs * self.max_pages
        self._range = np.arange(num_tokens + 1, dtype=np.int32)
        self._device_words = torch.zeros(num_words, dtype=torch.int32, device=accelerator.device)
        self._pinned = [self._pin(num_words) for _ in range(2)]

    def load(self, meta: StepMeta, records: IntArray, *, num_shared_pages: int = 0, num_padded: int = 0) -> LoadedStep:
        """Lay a step out and queue its copy.

        The views of one step are good until the next one is loaded; those on the host until the next but one.

        Args:
            meta: The step.
            records: [R, num_columns], for each of ``meta.logit_rows``; for each request, where the step is padded.
            num_shared_pages: Leading pages that all requests share, to stand apart. Each request has one more.
            num_padded: A graph's batch size, to which a decode step is padded; 0 = leave it as it is. A padded step has
                the logits of every request, and page indices with all the room that its batch size may need.
        """
        shape = StepShape(
            num_reqs=num_padded or meta.num_reqs,
            num_tokens=num_padded or meta.num_tokens,
            num_rows=num_padded or len(meta.logit_rows),
            has_shared=num_shared_pages > 0,
            is_padded=num_padded > 0,
        )
        at = self._layouts.find(shape)
        block = self._take_block()
        num_indices = self._fill(block.words, at, meta, records, num_shared_pages)
        num_words = at.indices + num_indices
        block.upload = self._accelerator.upload(block.tensor[:num_words], self._device_words[:num_words])
        if not shape.is_padded:
            return self._view(block, at, meta.max_q_len, num_shared_pages, num_indices)
        if shape not in block.views:
            block.views[shape] = self._view(block, at, 1, self.max_pages, shape.num_reqs * self.max_pages)
        return block.views[shape]

    def note_done(self, load_id: int) -> None:
        """Take in that the device is done with the steps up to that one: nothing reads their pinned memory."""
        for block in self._pinned:
            if block.load_id <= load_id:
                block.upload = None

    def _take_block(self) -> _PinnedBlock:
        self._pinned.reverse()
        block = self._pinned[0]
        if block.upload is not None:
            block.upload.synchronize()
        self.load_id += 1
        block.load_id = self.load_id
        return block

    def _pin(self, num_words: int) -> _PinnedBlock:
        tensor = self._accelerator.pinned(num_words)
        return _PinnedBlock(tensor, tensor.numpy())

    # ------------------------------------------------------------------ what is written there
    def _fill(self, words: IntArray, at: Sections, meta: StepMeta, records: IntArray, num_shared_pages: int) -> int:
        """Write all sections; return how many page indices there are."""
        pages, bounds, append_positions = meta.kv_indices, meta.kv_indptr, meta.positions
        if num_shared_pages:
            self._fill_shared(words, at, meta.kv_indices, num_shared_pages)
            pages, bounds = without_shared(meta, num_shared_pages)
            append_positions = append_positions - num_shared_pages * self._page_size
        words[at.records : at.records + records.size] = records.ravel()
        _put(words, at.qo_indptr, meta.qo_indptr)
        _put(words, at.kv_indptr, bounds)
        _put(words, at.last_page_len, meta.last_page_len)
        _put(words, at.token_ids, meta.token_ids)
        _put(words, at.positions, meta.positions)
        _put(words, at.append_positions, append_positions)
        _put(words, at.indices, pages)
        if at.shape.is_padded:
            return self._fill_padding(words, at, meta.num_reqs, len(pages))
        _put(words, at.batch_indices, self._batch_indices(meta))
        _put(words, at.logit_rows, meta.logit_rows)
        return len(pages)

    def _fill_padding(self, words: IntArray, at: Sections, num_reqs: int, num_pages: int) -> int:
        """Add requests of one token on the null page; return the number of page indices."""
        size = at.shape.num_reqs
        num_added = size - num_reqs
        _put(words, at.batch_indices, self._range[:size])
        _put(words, at.logit_rows, self._range[:size])
        if num_added:
            _put(words, at.qo_indptr + num_reqs, self._range[num_reqs : size + 1])
            _put(words, at.kv_indptr + num_reqs, self._range[: num_added + 1] + np.int32(num_pages))
            words[at.last_page_len + num_reqs : at.last_page_len + size] = 1
            for start in (at.token_ids, at.positions, at.append_positions):
                words[start + num_reqs : start + size] = 0
            words[at.indices + num_pages : at.indices + num_pages + num_added] = 0
        return num_pages + num_added

    def _fill_shared(self, words: IntArray, at: Sections, pages: IntArray, num_shared_pages: int) -> None:
        qo_indptr, kv_indptr, last_page_len = range(at.shared, at.shared + 3 * ALIGNMENT, ALIGNMENT)
        words[qo_indptr : qo_indptr + 2] = (0, at.shape.num_tokens)
        words[kv_indptr : kv_indptr + 2] = (0, num_shared_pages)
        words[last_page_len] = self._page_size
        _put(words, at.shared_indices, pages[:num_shared_pages])

    def _batch_indices(self, meta: StepMeta) -> IntArray:
        if meta.max_q_len == 1:
            return self._range[: meta.num_reqs]
        return np.repeat(self._range[: meta.num_reqs], np.diff(meta.qo_indptr))

    # ------------------------------------------------------------------ what is seen of it
    def _view(self, block: _PinnedBlock, at: Sections, max_q_len: int, num_shared: int, num_indices: int) -> LoadedStep:
        shape, host, device = at.shape, block.tensor, self._device_words
        num_reqs, num_tokens = shape.num_reqs, shape.num_tokens
        records = device[at.records : at.records + shape.num_rows * self._num_columns]
        pages = _csr(host, device, (at.kv_indptr, at.last_page_len, at.indices), num_reqs, num_indices)
        shared, shared_qo_host, shared_qo = None, None, None
        if shape.has_shared:
            starts = (at.shared + ALIGNMENT, at.shared + 2 * ALIGNMENT, at.shared_indices)
            shared = _csr(host, device, starts, 1, num_shared)
            shared_qo_host, shared_qo = host[at.shared : at.shared + 2], device[at.shared : at.shared + 2]
        tensors = StepTensors(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            max_q_len=max_q_len,
            qo_indptr_host=host[at.qo_indptr : at.qo_indptr + num_reqs + 1],
            qo_indptr=device[at.qo_indptr : at.qo_indptr + num_reqs + 1],
            token_ids=device[at.token_ids : at.token_ids + num_tokens],
            positions=device[at.positions : at.positions + num_tokens],
            batch_indices=device[at.batch_indices : at.batch_indices + num_tokens],
            append_positions=device[at.append_positions : at.append_positions + num_tokens],
            logit_rows=device[at.logit_rows : at.logit_rows + shape.num_rows],
            pages=pages,
            shared=shared,
            shared_qo_indptr_host=shared_qo_host,
            shared_qo_indptr=shared_qo,
        )
        return LoadedStep(tensors, records.view(shape.num_rows, self._num_columns))


def _put(words: IntArray, start: int, values: IntArray) -> None:
    words[start : start + len(values)] = values


def _csr(
    host: torch.Tensor, device: torch.Tensor, starts: tuple[int, int, int], num_reqs: int, num_indices: int
) -> CsrPages:
    """View a page table whose indptr, last_page_len and indices start so many words into the blocks."""
    indptr, last_page_len, indices = starts
    return CsrPages(
        indptr_host=host[indptr : indptr + num_reqs + 1],
        last_page_len_host=host[last_page_len : last_page_len + num_reqs],
        indptr=device[indptr : indptr + num_reqs + 1],
        indices=device[indices : indices + num_indices],
        last_page_len=device[last_page_len : last_page_len + num_reqs],
    )
