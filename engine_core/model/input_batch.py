"""The runner's own memory of each running request, and the step's arrays made from it.

Learns of requests only through SchedulerOutput deltas and its own samples; never looks into the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine_core.sampling_params import SamplingParams
from engine_core.scheduler.output import NewRequestData, SchedulerOutput
from kernels.backend import IntArray, StepMeta


class RequestRow:
    """One running request: its tokens, its block table and how to sample it."""

    __slots__ = ("_block_ids", "_token_ids", "num_blocks", "num_prompt_tokens", "num_tokens", "request_id", "sampling")

    def __init__(self, data: NewRequestData, *, max_model_len: int, block_size: int) -> None:
        self.request_id = data.request_id
        self.sampling: SamplingParams = data.sampling_params
        self.num_prompt_tokens = data.num_prompt_tokens
        longest = min(max_model_len, data.num_prompt_tokens + data.sampling_params.max_tokens)
        self._token_ids: IntArray = np.empty(max(longest, len(data.token_ids)) + 1, np.int32)
        self._block_ids: IntArray = np.empty(-(-len(self._token_ids) // block_size) + 1, np.int32)
        self.num_tokens = len(data.token_ids)
        self._token_ids[: self.num_tokens] = data.token_ids
        self.num_blocks = 0
        self.append_blocks(data.block_ids)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def tokens(self, start: int, stop: int) -> IntArray:
        return self._token_ids[start:stop]

    def blocks(self, num: int) -> IntArray:
        return self._block_ids[:num]

    def append_token(self, token_id: int) -> None:
        self._token_ids[self.num_tokens] = token_id
        self.num_tokens += 1

    def append_blocks(self, block_ids: list[int]) -> None:
        end = self.num_blocks + len(block_ids)
        self._block_ids[self.num_blocks : end] = block_ids
        self.num_blocks = end


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's arrays, and whom the rows of its logits belong to.

    Attributes:
        meta: For the decoder and the backend.
        sampling_rows: [R], the request of each logit row.
        sampling_lines: [R], its line in the SchedulerOutput's columns.
    """

    meta: StepMeta
    sampling_rows: list[RequestRow]
    sampling_lines: list[int]


class InputBatch:
    """All running requests, by id."""

    def __init__(self, *, max_model_len: int, block_size: int) -> None:
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._rows: dict[str, RequestRow] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def apply(self, output: SchedulerOutput) -> None:
        """Take in what changed since the last output: who left, who entered, whose table grew."""
        for request_id in (*output.finished_req_ids, *output.preempted_req_ids):
            self._rows.pop(request_id, None)
        for data in output.scheduled_new_reqs:
            self._rows[data.request_id] = RequestRow(
                data, max_model_len=self._max_model_len, block_size=self._block_size
            )
        for request_id, block_ids in output.new_block_ids.items():
            self._rows[request_id].append_blocks(block_ids)

    def build_step(self, output: SchedulerOutput) -> StepInputs:
        """Lay out the scheduled tokens, single-token requests first (StepMeta's order)."""
        # sorted() is stable: within a group the schedule's order stays.
        lines = sorted(range(len(output.req_ids)), key=lambda line: output.token_counts[line] > 1)
        rows = [self._rows[output.req_ids[line]] for line in lines]
        q_lens = np.array([output.token_counts[line] for line in lines], np.int32)
        q_starts = np.array([output.starts[line] for line in lines], np.int32)
        ends = (q_starts + q_lens).tolist()
        # Whoever reaches the last token that this runner knows samples: a step scheduled before the tokens of the one
        # before it were known finds them here.
        sampling = [index for index, row in enumerate(rows) if ends[index] == row.num_tokens]
        meta = self._lay_out(rows, q_starts, q_lens, sampling)
        return StepInputs(meta, [rows[index] for index in sampling], [lines[index] for index in sampling])

    def _lay_out(self, rows: list[RequestRow], q_starts: IntArray, q_lens: IntArray, sampling: list[int]) -> StepMeta:
        size = self._block_size
        kv_lens = q_starts + q_lens
        num_pages = -(-kv_lens // size)
        ends = kv_lens.tolist()
        spans = list(zip(rows, q_starts.tolist(), ends, strict=True))
        positions = np.concatenate([np.arange(start, end, dtype=np.int32) for _, start, end in spans])
        slots = [row.blocks(row.num_blocks)[np.arange(start, end) // size] for row, start, end in spans]
        qo_indptr = _indptr(q_lens)
        return StepMeta(
            num_reqs=len(rows),
            num_tokens=len(positions),
            num_decodes=int((q_lens == 1).sum()),
            max_q_len=int(q_lens.max()),
            max_kv_len=int(kv_lens.max()),
            qo_indptr=qo_indptr,
            kv_indptr=_indptr(num_pages),
            kv_indices=np.concatenate([row.blocks(num) for row, num in zip(rows, num_pages.tolist(), strict=True)]),
            last_page_len=(kv_lens - (num_pages - 1) * size).astype(np.int32),
            kv_lens=kv_lens,
            token_ids=np.concatenate([row.tokens(start, end) for row, start, end in spans]),
            positions=positions,
            slot_mapping=np.concatenate(slots) * np.int32(size) + positions % size,
            logit_rows=(qo_indptr[1:] - 1)[np.array(sampling, np.intp)],
        )


def _indptr(lengths: IntArray) -> IntArray:
    """[n] lengths -> [n+1] offsets."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
