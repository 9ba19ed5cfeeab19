"""How a step's tokens come back, and to whom."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine_core.model.device_results import PendingStep, ResultRing, SampledRow
from engine_core.model.request_row import RequestRow
from engine_core.sampling_params import SamplingParams
from engine_core.scheduler.output import NewRequestData
from kernels.testing.fake_cuda import FakeAccelerator, FakeCudaError


def create_row(request_id: str, slot: int) -> RequestRow:
    data = NewRequestData(request_id, [7, 8, 9], 3, SamplingParams(max_tokens=5), [1], 0)
    return RequestRow(data, max_model_len=20, block_size=4, slot=slot)


def words(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_each_row_learns_its_token_and_the_scheduler_its_line() -> None:
    accelerator = FakeAccelerator()
    rows = [create_row(request_id, slot) for slot, request_id in enumerate("abc")]
    sampled = [SampledRow(row, line, row.append_unknown()) for row, line in zip(rows, (3, 0, 2), strict=True)]
    assert [row.token(3) for row in rows] == [~0, ~1, ~2]
    rows[0].append_unknown()  # by a step launched since
    arrival, found = ResultRing(accelerator, 8).send(words(40, -1, 42))
    step = PendingStep(load_id=1, arrival=arrival, words=found, sampled=sampled, num_lines=4)
    assert step.result is None
    step.finish()
    assert step.result is not None and step.result.token_ids == [-1, -1, 42, 40]
    assert set(step.result.errors) == {"b"} and "not finite" in step.result.errors["b"]
    assert [row.token(3) for row in rows] == [40, 0, 42], "the device took 0 where there was no token"
    assert rows[0].token(4) == ~0


def test_the_step_may_be_written_again_at_once() -> None:
    accelerator = FakeAccelerator()
    ring, reported = ResultRing(accelerator, 4), words(1, 2, 3)
    first = ring.send(reported)
    with accelerator.no_waits():
        reported.fill_(7)
        second = ring.send(reported[:2])
    first.arrival.synchronize()
    assert first.words.tolist() == [1, 2, 3]
    second.arrival.synchronize()
    assert second.words.tolist() == [7, 7] and first.words.tolist() == [1, 2, 3]


def test_a_third_result_takes_the_place_of_the_first() -> None:
    accelerator = FakeAccelerator()
    ring = ResultRing(accelerator, 4)
    for value in range(5):
        arrival, found = ring.send(words(value))
        arrival.synchronize()
        assert np.array_equal(found, [value])
    ring.send(words(1))
    ring.send(words(2))
    with pytest.raises(FakeCudaError):
        ring.send(words(3))
