"""ModelRunner: executes one SchedulerOutput on the device and samples. The only holder of device state."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine_core.model.decoder import LanguageModel
from engine_core.model.input_batch import InputBatch, PromptLogits, RequestRow, StepInputs
from engine_core.model.logprobs import token_logprobs
from engine_core.model.noise import FloatRow
from engine_core.model.sampler import pick_token
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from kernels.backend import KVPool
from kernels.fused import HeadRows

_NOT_FINITE = "The model gave logits that are not finite; try another prompt or dtype."


class ModelRunner:
    """A model, its KV pages, and the running requests' tokens.

    Args:
        decoder: The loaded model.
        kv: Its pages; page ids are the scheduler's block ids.
        max_model_len: Context in tokens.
        num_token_ids: Ids that the tokenizer knows; None = the model's whole vocabulary. The rest of a row of logits is
            padding: nobody ever looks at it.
    """

    def __init__(
        self, *, decoder: LanguageModel, kv: KVPool, max_model_len: int, num_token_ids: int | None = None
    ) -> None:
        self._decoder = decoder
        self._kv = kv
        self._batch = InputBatch(max_model_len=max_model_len, block_size=kv.page_size)
        self._num_token_ids = min(num_token_ids or decoder.arch.vocab_size, decoder.arch.vocab_size)

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the scheduled tokens, and sample where a request's last known token was among them."""
        self._batch.apply(output)
        if output.total_num_scheduled_tokens == 0:
            return ModelRunnerOutput()
        step = self._batch.build_step(output)
        result = ModelRunnerOutput(token_ids=[-1] * len(output.req_ids))
        first = 0
        for piece in self._decoder.compute(
            step.meta, self._kv, needs_logits=step.needs_logits, num_token_ids=self._num_token_ids
        ):
            self._read(step, first, piece, result)
            first += len(piece.greedy_ids)
            del piece  # the next one takes its place
        return result

    def _read(self, step: StepInputs, first: int, piece: HeadRows, result: ModelRunnerOutput) -> None:
        """Give the head's rows from ``first`` on to those whom they belong to."""
        greedy_ids, is_finite = piece.greedy_ids.tolist(), piece.is_finite.tolist()
        stop = first + len(greedy_ids)
        logits = None if piece.logits is None else piece.logits[:, : self._num_token_ids]
        for prompt in step.prompt_logits:
            assert logits is not None, "asked for"
            self._read_prompt(prompt.within(first, stop), logits, is_finite, result)
        for row, line, index in zip(step.sampling_rows, step.sampling_lines, step.sampling_logits, strict=True):
            if not first <= index < stop:
                continue
            if not is_finite[index - first]:
                result.errors[row.request_id] = _NOT_FINITE
            if row.request_id in result.errors:
                row.append_token(0)  # a step that is scheduled already takes a token from here
                continue
            if row.is_greedy:
                token_id = greedy_ids[index - first]
                row.append_token(token_id)
            else:
                assert logits is not None, "asked for"
                token_id = self._sample(row, logits[index - first], result)
            result.token_ids[line] = token_id
            if row.prompt_logprobs is not None:
                _hand_over_prompt(row, result)

    def _sample(self, row: RequestRow, logits: FloatRow, result: ModelRunnerOutput) -> int:
        """Pick a row's next token as its request wants it."""
        token_id = pick_token(logits, row.sampling, row.own_tokens())
        row.append_token(token_id)
        num_top = row.sampling.num_logprobs
        if num_top is not None:
            result.logprobs[row.request_id] = [token_logprobs(logits, token_id, num_top)]
        return token_id

    def _read_prompt(
        self, prompt: PromptLogits, logits: NDArray[np.float32], is_finite: list[bool], result: ModelRunnerOutput
    ) -> None:
        """Take in what a chunk says about its prompt."""
        row = prompt.row
        if len(prompt.token_ids) == 0 or row.request_id in result.errors:
            return  # it has been read to its end
        num_top = row.sampling.num_prompt_logprobs
        assert num_top is not None and row.prompt_logprobs is not None, "asked for"
        for index, token_id in enumerate(prompt.token_ids.tolist(), start=prompt.first_logits):
            if not is_finite[index]:
                result.errors[row.request_id] = _NOT_FINITE
                row.prompt_logprobs = None
                return
            row.prompt_logprobs.append(token_logprobs(logits[index], token_id, num_top))


def _hand_over_prompt(row: RequestRow, result: ModelRunnerOutput) -> None:
    assert row.prompt_logprobs is not None
    assert len(row.prompt_logprobs) == row.num_prompt_tokens - 1, "the whole prompt was computed for it"
    result.prompt_logprobs[row.request_id] = row.prompt_logprobs
    row.prompt_logprobs = None
