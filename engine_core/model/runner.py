"""ModelRunner: executes one SchedulerOutput and samples. Holds the running requests' tokens, and the model's KV."""

from __future__ import annotations

from engine_core.model.decoder import LanguageModel
from engine_core.model.head_reader import HeadReader
from engine_core.model.input_batch import InputBatch
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from kernels.backend import KVPool


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
        reader, first = HeadReader(step, len(output.req_ids)), 0
        for piece in self._decoder.compute(
            step.meta, self._kv, needs_logits=step.needs_logits, num_token_ids=self._num_token_ids
        ):
            logits = None if piece.logits is None else piece.logits[:, : self._num_token_ids]
            reader.read(first, piece.greedy_ids.tolist(), piece.is_finite.tolist(), logits)
            first += len(piece.greedy_ids)
            del piece, logits  # the next ones take their place
        return reader.result
