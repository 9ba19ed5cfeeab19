"""HeadReader: gives what the head says of a step's rows to the requests that they belong to, and picks their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from engine_core.model.input_batch import PromptLogits, StepInputs
from engine_core.model.logprobs import token_logprobs
from engine_core.model.noise import FloatRow
from engine_core.model.request_row import RequestRow
from engine_core.model.sampler import pick_token
from engine_core.scheduler.output import ModelRunnerOutput

NOT_FINITE = "The model gave logits that are not finite; try another prompt or dtype."

# Rows by place, for whoever asks for one: all of them, or those that somebody needs.
LogitRows: TypeAlias = NDArray[np.float32] | Mapping[int, FloatRow]


class HeadReader:
    """Reads one step's rows, as they come, and keeps what comes of them.

    Args:
        step: Whose rows.
        num_lines: Of the SchedulerOutput's columns.

    Attributes:
        result: What has been read so far.
    """

    def __init__(self, step: StepInputs, num_lines: int) -> None:
        self.result = ModelRunnerOutput(token_ids=[-1] * num_lines)
        self._step = step
        self._needs_logits: list[bool] = step.needs_logits.tolist()

    def read(self, first: int, token_ids: list[int], is_finite: list[bool], logits: LogitRows | None) -> None:
        """Read the rows from ``first`` on.

        Args:
            first: Among the step's logit rows.
            token_ids: [n], for rows whose logits nobody needs: their tokens.
            is_finite: [n].
            logits: By place from ``first`` on, without padding: at least those that are needed.
        """
        step, result, stop = self._step, self.result, first + len(token_ids)
        for prompt in step.prompt_logits:
            self._read_prompt(prompt.within(first, stop), logits, is_finite)
        for row, line, index in zip(step.sampling_rows, step.sampling_lines, step.sampling_logits, strict=True):
            if not first <= index < stop:
                continue
            if not is_finite[index - first]:
                result.errors[row.request_id] = NOT_FINITE
            if row.request_id in result.errors:
                row.append_token(0)  # a step that is scheduled already takes a token from here
                continue
            if self._needs_logits[index]:
                assert logits is not None, "asked for"
                token_id = self._sample(row, logits[index - first])
            else:
                token_id = token_ids[index - first]
                row.append_token(token_id)
            result.token_ids[line] = token_id
            if row.prompt_logprobs is not None:
                self._hand_over_prompt(row)

    def _sample(self, row: RequestRow, logits: FloatRow) -> int:
        """Pick a row's next token as its request wants it."""
        token_id = pick_token(logits, row.sampling, row.own_tokens())
        row.append_token(token_id)
        num_top = row.sampling.num_logprobs
        if num_top is not None:
            self.result.logprobs[row.request_id] = [token_logprobs(logits, token_id, num_top)]
        return token_id

    def _read_prompt(self, prompt: PromptLogits, logits: LogitRows | None, is_finite: list[bool]) -> None:
        """Take in what a chunk says about its prompt."""
        row = prompt.row
        if len(prompt.token_ids) == 0 or row.request_id in self.result.errors:
            return  # it has been read to its end
        num_top = row.sampling.num_prompt_logprobs
        assert num_top is not None and row.prompt_logprobs is not None and logits is not None, "asked for"
        for index, token_id in enumerate(prompt.token_ids.tolist(), start=prompt.first_logits):
            if not is_finite[index]:
                self.result.errors[row.request_id] = NOT_FINITE
                row.prompt_logprobs = None
                return
            row.prompt_logprobs.append(token_logprobs(logits[index], token_id, num_top))

    def _hand_over_prompt(self, row: RequestRow) -> None:
        assert row.prompt_logprobs is not None
        assert len(row.prompt_logprobs) == row.num_prompt_tokens - 1, "the whole prompt was computed for it"
        self.result.prompt_logprobs[row.request_id] = row.prompt_logprobs
        row.prompt_logprobs = None
