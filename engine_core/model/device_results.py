"""What comes back from the device: a step's tokens by a copy on the side stream, waited for when they are wanted."""

from __future__ import annotations

from typing import NamedTuple

import torch

from engine_core.model.head_reader import NOT_FINITE
from engine_core.model.request_row import RequestRow
from engine_core.scheduler.output import ModelRunnerOutput
from kernels.accelerator import Accelerator, Event
from kernels.backend import IntArray


class Reported(NamedTuple):
    """A step's tokens on their way.

    Attributes:
        arrival: When it has come, they are there.
        words: [R], -1 for rows whose logits were not finite.
    """

    arrival: Event
    words: IntArray


class ResultRing:
    """Two places for results on the device and two on the host, in turn: one is read while the other is written.

    Args:
        accelerator: Copies.
        max_num_rows: Rows of a step at most.
    """

    def __init__(self, accelerator: Accelerator, max_num_rows: int) -> None:
        self._accelerator = accelerator
        self._places = []
        for _ in range(2):
            on_device = torch.zeros(max_num_rows, dtype=torch.int32, device=accelerator.device)
            pinned = accelerator.pinned(max_num_rows)
            self._places.append((on_device, pinned, pinned.numpy()))

    def send(self, reported: torch.Tensor) -> Reported:
        """Queue the copies of [R] int32. Whoever gets the result before the last one has waited for it.

        The first copy stays on the device: what the step wrote is written again by the next, which waits for nobody.
        """
        self._places.reverse()
        on_device, pinned, words = self._places[0]
        num_rows = len(reported)
        source = on_device[:num_rows]
        source.copy_(reported)
        return Reported(self._accelerator.download(source, pinned[:num_rows]), words[:num_rows])


class SampledRow(NamedTuple):
    """Where a row's token belongs.

    Attributes:
        row: Whose.
        line: In the SchedulerOutput's columns.
        position: Among the row's tokens.
    """

    row: RequestRow
    line: int
    position: int


class PendingStep:
    """A step that the device has been given.

    Args:
        load_id: The step block's.
        arrival: When it has come, the step is done.
        words: [R], see Reported.
        sampled: [R], whose.
        num_lines: Of the SchedulerOutput's columns.

    Attributes:
        load_id: As given.
        result: None until finish().
    """

    def __init__(
        self, *, load_id: int, arrival: Event, words: IntArray, sampled: list[SampledRow], num_lines: int
    ) -> None:
        self.load_id = load_id
        self.result: ModelRunnerOutput | None = None
        self._arrival = arrival
        self._words = words
        self._sampled = sampled
        self._num_lines = num_lines

    def finish(self) -> None:
        """Wait for the step's end, and give each row its token."""
        self._arrival.synchronize()
        result = ModelRunnerOutput(token_ids=[-1] * self._num_lines)
        for (row, line, position), token_id in zip(self._sampled, self._words.tolist(), strict=True):
            if token_id < 0:
                result.errors[row.request_id] = NOT_FINITE
                row.set_token(position, 0)  # as on the device: a step that is scheduled already takes it from there
                continue
            row.set_token(position, token_id)
            result.token_ids[line] = token_id
        self.result = result
