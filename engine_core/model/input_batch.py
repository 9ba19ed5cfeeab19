"""The runner's own memory of each running request, and the step's arrays made from it.

Learns of requests only through SchedulerOutput deltas and its own samples; never looks into the scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from engine_core.messages import TokenLogprobs
from engine_core.model.sampler import OwnTokens
from engine_core.sampling_params import SamplingParams
from engine_core.scheduler.output import NewRequestData, SchedulerOutput
from kernels.backend import IntArray, StepMeta


class RequestRow:
    """One running request: its tokens, its block table and how to sample it.

    Attributes:
        prompt_logprobs: Of the prompt's tokens from the second on, as far as computed, where the request asked for them
            and has not got them; else None. A request that comes back without an output starts anew, one that has
            outputs has them.
    """

    __slots__ = (
        "_block_ids",
        "_token_ids",
        "num_blocks",
        "num_prompt_tokens",
        "num_tokens",
        "prompt_logprobs",
        "request_id",
        "sampling",
    )

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
        is_gathering = self.sampling.num_prompt_logprobs is not None and self.num_tokens == self.num_prompt_tokens
        self.prompt_logprobs: list[TokenLogprobs] | None = [] if is_gathering else None

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def own_tokens(self) -> OwnTokens:
        return OwnTokens(
            prompt=self._token_ids[: self.num_prompt_tokens],
            output=self._token_ids[self.num_prompt_tokens : self.num_tokens],
        )

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
    """

    meta: StepMeta
    sampling_rows: list[RequestRow]
    sampling_lines: list[int]
    sampling_logits: list[int]
    prompt_logits: list[PromptLogits]


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
        starts, ends = q_starts.tolist(), (q_starts + q_lens).tolist()
        logit_tokens: list[int] = []  # indices into the step's tokens
        sampling, sampling_logits, prompt_logits = list[int](), list[int](), list[PromptLogits]()
        end_token = 0
        for index, row in enumerate(rows):
            start, end = starts[index], ends[index]
            first_token, end_token = end_token, end_token + end - start
            if row.prompt_logprobs is not None:
                foretold = row.tokens(start + 1, min(end + 1, row.num_prompt_tokens))
                prompt_logits.append(PromptLogits(row, len(logit_tokens), foretold))
                logit_tokens += range(first_token, first_token + len(foretold))
            # Whoever reaches the last token that this runner knows samples: a step scheduled before the tokens of the
            # one before it were known finds them here.
            if end == row.num_tokens:
                sampling.append(index)
                sampling_logits.append(len(logit_tokens))
                logit_tokens.append(end_token - 1)
        meta = self._lay_out(rows, q_starts, q_lens, logit_tokens)
        sampling_rows, sampling_lines = [rows[index] for index in sampling], [lines[index] for index in sampling]
        return StepInputs(meta, sampling_rows, sampling_lines, sampling_logits, prompt_logits)

    def _lay_out(
        self, rows: list[RequestRow], q_starts: IntArray, q_lens: IntArray, logit_tokens: list[int]
    ) -> StepMeta:
        size = self._block_size
        kv_lens = q_starts + q_lens
        num_pages = -(-kv_lens // size)
        ends = kv_lens.tolist()
        spans = list(zip(rows, q_starts.tolist(), ends, strict=True))
        positions = np.concatenate([np.arange(start, end, dtype=np.int32) for _, start, end in spans])
        slots = [row.blocks(row.num_blocks)[np.arange(start, end) // size] for row, start, end in spans]
        return StepMeta(
            num_reqs=len(rows),
            num_tokens=len(positions),
            num_decodes=int((q_lens == 1).sum()),
            max_q_len=int(q_lens.max()),
            max_kv_len=int(kv_lens.max()),
            qo_indptr=_indptr(q_lens),
            kv_indptr=_indptr(num_pages),
            kv_indices=np.concatenate([row.blocks(num) for row, num in zip(rows, num_pages.tolist(), strict=True)]),
            last_page_len=(kv_lens - (num_pages - 1) * size).astype(np.int32),
            kv_lens=kv_lens,
            token_ids=np.concatenate([row.tokens(start, end) for row, start, end in spans]),
            positions=positions,
            slot_mapping=np.concatenate(slots) * np.int32(size) + positions % size,
            logit_rows=np.array(logit_tokens, np.int32),
        )


def _indptr(lengths: IntArray) -> IntArray:
    """[n] lengths -> [n+1] offsets."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
