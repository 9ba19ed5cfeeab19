"""The runner's own memory of each running request, and the step's arrays made from it.

Learns of requests only through SchedulerOutput deltas and its own samples; never looks into the scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from engine_core.model.request_row import RequestRow
from engine_core.scheduler.output import SchedulerOutput
from kernels.backend import IntArray, StepMeta


@dataclass(frozen=True, slots=True)
class PromptLogits:
    """A run of logit rows, each of which foretold a token of a prompt.

    Attributes:
        row: Whose.
        first_logits: Where the run starts among the step's logit rows.
        token_ids: [n], the token that came after each.
    """

    row: RequestRow
    first_logits: int
    token_ids: IntArray

    def within(self, first: int, stop: int) -> PromptLogits:
        """Return the part of the run that lies within ``first:stop``, counted from there; it may be empty."""
        skipped = max(first - self.first_logits, 0)
        token_ids = self.token_ids[skipped : max(stop - self.first_logits, 0)]
        return PromptLogits(self.row, self.first_logits + skipped - first, token_ids)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """One step's arrays, and whom the rows of its logits belong to.

    Attributes:
        meta: For the decoder and the backend.
        sampling_rows: [S], each request that samples.
        sampling_lines: [S], its line in the SchedulerOutput's columns.
        sampling_logits: [S], which of the R logit rows it samples from.
        prompt_logits: The rest of the logit rows, for requests that asked about their prompts.
        needs_logits: [R], whether somebody reads the logits themselves.
    """

    meta: StepMeta
    sampling_rows: list[RequestRow]
    sampling_lines: list[int]
    sampling_logits: list[int]
    prompt_logits: list[PromptLogits]
    needs_logits: NDArray[np.bool_]


class InputBatch:
    """All running requests, by id.

    Args:
        max_model_len: Context in tokens.
        block_size: Tokens a block.
        picks_on_device: Whether the device also draws, so that only rows that bend logits need them.
    """

    def __init__(self, *, max_model_len: int, block_size: int, picks_on_device: bool = False) -> None:
        self._max_model_len = max_model_len
        self._block_size = block_size
        self._picks_on_device = picks_on_device
        self._rows: dict[str, RequestRow] = {}
        self._free_slots: list[int] = []

    def __len__(self) -> int:
        return len(self._rows)

    def apply(self, output: SchedulerOutput) -> None:
        """Take in what changed since the last output: who left, who entered, whose table grew."""
        for request_id in (*output.finished_req_ids, *output.preempted_req_ids):
            self._drop(request_id)
        for data in output.scheduled_new_reqs:
            self._drop(data.request_id)
            slot = self._free_slots.pop() if self._free_slots else len(self._rows)
            self._rows[data.request_id] = RequestRow(
                data, max_model_len=self._max_model_len, block_size=self._block_size, slot=slot
            )
        for request_id, block_ids in output.new_block_ids.items():
            self._rows[request_id].append_blocks(block_ids)

    def _drop(self, request_id: str) -> None:
        row = self._rows.pop(request_id, None)
        if row is not None:
            self._free_slots.append(row.slot)

    def build_step(self, output: SchedulerOutput) -> StepInputs:
        """Lay out the scheduled tokens, single-token requests first (StepMeta's order).

        64 decoding requests take 80 us: what is done for each of them is counted in lookups.
        """
        lines = _singles_first(output.token_counts)
        by_id = self._rows
        rows = [by_id[output.req_ids[line]] for line in lines]
        starts = [output.starts[line] for line in lines]
        q_lens = [output.token_counts[line] for line in lines]
        wanted = _WantedLogits(picks_on_device=self._picks_on_device)
        end_token = 0
        for row, line, start, q_len in zip(rows, lines, starts, q_lens, strict=True):
            first_token, end_token = end_token, end_token + q_len
            end = start + q_len
            if row.prompt_logprobs is not None:
                wanted.add_prompt(row, first_token, row.tokens(start + 1, min(end + 1, row.num_prompt_tokens)))
            # Whoever reaches the last token that this runner knows samples: a step scheduled before the tokens of the
            # one before it were known finds them here.
            if end == row.num_tokens:
                wanted.add_sampling(row, line, end_token - 1)
        meta = self._lay_out(rows, starts, q_lens, wanted.tokens)
        meta.num_common_pages = output.num_common_prefix_blocks
        return wanted.build(meta)

    def _lay_out(
        self, rows: list[RequestRow], starts: list[int], q_lens: list[int], logit_tokens: list[int]
    ) -> StepMeta:
        size = self._block_size
        # Lists first: a kernel has just been through the caches, and each numpy call costs 4 us then.
        kv_lens = [start + q_len for start, q_len in zip(starts, q_lens, strict=True)]
        num_pages = [-(-kv_len // size) for kv_len in kv_lens]
        page_lens = [kv_len - (num - 1) * size for kv_len, num in zip(kv_lens, num_pages, strict=True)]
        token_ids, positions, slots = _lay_out_tokens(rows, starts, q_lens, size)
        return StepMeta(
            num_reqs=len(rows),
            num_tokens=len(token_ids),
            num_decodes=q_lens.count(1),
            max_q_len=max(q_lens),
            max_kv_len=max(kv_lens),
            qo_indptr=_int32([0, *accumulate(q_lens)]),
            kv_indptr=_int32([0, *accumulate(num_pages)]),
            kv_indices=np.concatenate([row.blocks(num) for row, num in zip(rows, num_pages, strict=True)]),
            last_page_len=_int32(page_lens),
            kv_lens=_int32(kv_lens),
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slots,
            logit_rows=_int32(logit_tokens),
        )


class _WantedLogits:
    """Collects which of a step's tokens have their logits read, and by whom."""

    def __init__(self, *, picks_on_device: bool) -> None:
        self._picks_on_device = picks_on_device
        self.tokens: list[int] = []  # indices into the step's tokens
        self._sampling_rows: list[RequestRow] = []
        self._sampling_lines: list[int] = []
        self._sampling_logits: list[int] = []
        self._prompts: list[PromptLogits] = []
        self._needs_logits: list[bool] = []

    def add_prompt(self, row: RequestRow, first_token: int, foretold: IntArray) -> None:
        self._prompts.append(PromptLogits(row, len(self.tokens), foretold))
        self.tokens += range(first_token, first_token + len(foretold))
        self._needs_logits += [True] * len(foretold)

    def add_sampling(self, row: RequestRow, line: int, token: int) -> None:
        self._sampling_rows.append(row)
        self._sampling_lines.append(line)
        self._sampling_logits.append(len(self.tokens))
        self.tokens.append(token)
        self._needs_logits.append(not (row.is_picked_on_device() if self._picks_on_device else row.is_greedy))

    def build(self, meta: StepMeta) -> StepInputs:
        return StepInputs(
            meta=meta,
            sampling_rows=self._sampling_rows,
            sampling_lines=self._sampling_lines,
            sampling_logits=self._sampling_logits,
            prompt_logits=self._prompts,
            needs_logits=np.array(self._needs_logits, np.bool_),
        )


def _singles_first(token_counts: list[int]) -> Sequence[int]:
    """Return the lines with one token, then the others, each part in its order."""
    num_singles = token_counts.count(1)
    if token_counts[:num_singles].count(1) == num_singles:  # as the scheduler has it, unless a prompt ends by one token
        return range(len(token_counts))
    return sorted(range(len(token_counts)), key=lambda line: token_counts[line] > 1)  # sorted() is stable


def _lay_out_tokens(
    rows: list[RequestRow], starts: list[int], q_lens: list[int], block_size: int
) -> tuple[IntArray, IntArray, IntArray]:
    """Return each token's id, its position, and its slot in the pages. Rows with one token come first."""
    num_singles = q_lens.count(1)
    singles = list(zip(rows[:num_singles], starts[:num_singles], strict=True))
    token_ids = [_int32([row.token(start) for row, start in singles])]
    positions = [_int32(starts[:num_singles])]
    slots = [_int32([row.block(start // block_size) * block_size + start % block_size for row, start in singles])]
    if num_singles == len(rows):
        return token_ids[0], positions[0], slots[0]
    for row, start, q_len in zip(rows[num_singles:], starts[num_singles:], q_lens[num_singles:], strict=True):
        span = np.arange(start, start + q_len, dtype=np.int32)
        token_ids.append(row.tokens(start, start + q_len))
        positions.append(span)
        blocks = row.blocks(row.num_blocks)[span // block_size]
        slots.append(blocks * np.int32(block_size) + span % np.int32(block_size))
    return np.concatenate(token_ids), np.concatenate(positions), np.concatenate(slots)


def _int32(values: list[int]) -> IntArray:
    return np.array(values, np.int32)
