"""ModelRunner: executes one SchedulerOutput on the device and samples. The only holder of device state."""

from __future__ import annotations

import torch

from engine_core.model.decoder import Decoder
from engine_core.model.input_batch import InputBatch
from engine_core.model.sampler import sample
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from kernels.backend import KVPool


class ModelRunner:
    """A decoder, its KV pages, and the running requests' tokens.

    Args:
        decoder: The loaded model.
        kv: Pages; page ids are the scheduler's block ids.
        max_model_len: Context in tokens.
    """

    def __init__(self, *, decoder: Decoder, kv: KVPool, max_model_len: int) -> None:
        self._decoder = decoder
        self._kv = kv
        self._batch = InputBatch(max_model_len=max_model_len, block_size=kv.page_size)

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the scheduled tokens, and sample where a request's last known token was among them."""
        self._batch.apply(output)
        if output.total_num_scheduled_tokens == 0:
            return ModelRunnerOutput()
        step = self._batch.build_step(output)
        logits = self._decoder.forward(step.meta, self._kv)
        result = ModelRunnerOutput(token_ids=[-1] * len(output.req_ids))
        rows = step.sampling_rows
        if not rows:
            return result
        samples = sample(logits, [row.sampling for row in rows], [row.num_output_tokens for row in rows])
        for row, line, token_id, is_valid in zip(
            rows, step.sampling_lines, samples.token_ids, samples.is_valid, strict=True
        ):
            # Also where it is not valid: a step that is scheduled already takes a token from here.
            row.append_token(token_id)
            if is_valid:
                result.token_ids[line] = token_id
            else:
                result.errors[row.request_id] = "the model gave logits that are not finite; try another prompt or dtype"
        return result
