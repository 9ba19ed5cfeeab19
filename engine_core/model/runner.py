"""ModelRunner: executes one SchedulerOutput on the device and samples. The only holder of device state."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from engine_core.model.decoder import Decoder
from engine_core.model.input_batch import InputBatch, PromptLogits, RequestRow, StepInputs
from engine_core.model.logprobs import token_logprobs
from engine_core.model.noise import FloatRow
from engine_core.model.sampler import is_finite, pick_token
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from kernels.backend import KVPool

_NOT_FINITE = "The model gave logits that are not finite; try another prompt or dtype."


class ModelRunner:
    """A decoder, its KV pages, and the running requests' tokens.

    Args:
        decoder: The loaded model.
        kv: Pages; page ids are the scheduler's block ids.
        max_model_len: Context in tokens.
        num_token_ids: Ids that the tokenizer knows; None = the model's whole vocabulary. The rest of a row of logits is
            padding: nobody ever looks at it.
    """

    def __init__(self, *, decoder: Decoder, kv: KVPool, max_model_len: int, num_token_ids: int | None = None) -> None:
        self._decoder = decoder
        self._kv = kv
        self._batch = InputBatch(max_model_len=max_model_len, block_size=kv.page_size)
        self._num_token_ids = min(num_token_ids or decoder.arch.vocab_size, decoder.arch.vocab_size)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the scheduled tokens, and sample where a request's last known token was among them."""
        self._batch.apply(output)
        if output.total_num_scheduled_tokens == 0:
            return ModelRunnerOutput()
        step = self._batch.build_step(output)
        result = ModelRunnerOutput(token_ids=[-1] * len(output.req_ids))
        first = 0
        for padded in self._decoder.iter_logits(self._decoder.forward(step.meta, self._kv)):
            logits: NDArray[np.float32] = padded.cpu().contiguous().numpy()[:, : self._num_token_ids]
            self._read(step, first, logits, result)
            first += len(logits)
            del padded, logits  # the next ones take their place
        return result

    def _read(self, step: StepInputs, first: int, logits: NDArray[np.float32], result: ModelRunnerOutput) -> None:
        """Give the logit rows from ``first`` on to those whom they belong to."""
        stop = first + len(logits)
        for prompt in step.prompt_logits:
            self._read_prompt(prompt.within(first, stop), logits, result)
        for row, line, index in zip(step.sampling_rows, step.sampling_lines, step.sampling_logits, strict=True):
            if first <= index < stop:
                result.token_ids[line] = self._sample(row, logits[index - first], result)

    def _sample(self, row: RequestRow, logits: FloatRow, result: ModelRunnerOutput) -> int:
        """Pick a row's next token, or end its request with an error; return what goes into the column."""
        if not is_finite(logits):
            result.errors[row.request_id] = _NOT_FINITE
        if row.request_id in result.errors:
            row.append_token(0)  # a step that is scheduled already takes a token from here
            return -1
        token_id = pick_token(logits, row.sampling, row.own_tokens())
        row.append_token(token_id)
        num_top = row.sampling.num_logprobs
        if num_top is not None:
            result.logprobs[row.request_id] = [token_logprobs(logits, token_id, num_top)]
        if row.prompt_logprobs is not None:
            assert len(row.prompt_logprobs) == row.num_prompt_tokens - 1, "the whole prompt was computed for it"
            result.prompt_logprobs[row.request_id] = row.prompt_logprobs
            row.prompt_logprobs = None
        return token_id

    def _read_prompt(self, prompt: PromptLogits, logits: NDArray[np.float32], result: ModelRunnerOutput) -> None:
        """Take in what a chunk says about its prompt."""
        row = prompt.row
        if len(prompt.token_ids) == 0 or row.request_id in result.errors:
            return  # it has been read to its end
        num_top = row.sampling.num_prompt_logprobs
        assert num_top is not None and row.prompt_logprobs is not None, "asked for"
        for index, token_id in enumerate(prompt.token_ids.tolist(), start=prompt.first_logits):
            if not is_finite(logits[index]):
                result.errors[row.request_id] = _NOT_FINITE
                row.prompt_logprobs = None
                return
            row.prompt_logprobs.append(token_logprobs(logits[index], token_id, num_top))
