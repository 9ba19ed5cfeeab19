"""From SchedulerOutput deltas to one step's arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine_core.model.input_batch import InputBatch, PromptLogits
from engine_core.sampling_params import SamplingParams
from engine_core.scheduler.output import NewRequestData, SchedulerOutput

PARAMS = SamplingParams(max_tokens=20)


def new(
    request_id: str, num_tokens: int, block_ids: list[int], *, computed: int = 0, prompt: int = 0
) -> NewRequestData:
    tokens = list(range(100, 100 + num_tokens))
    return NewRequestData(request_id, tokens, prompt or num_tokens, PARAMS, block_ids, computed, resumed=prompt > 0)


def output(
    counts: dict[str, int],
    new_reqs: list[NewRequestData] = [],  # noqa: B006 - never changed
    cached: dict[str, tuple[int, list[int]]] = {},  # noqa: B006 - never changed
    finished: tuple[str, ...] = (),
    preempted: tuple[str, ...] = (),
) -> SchedulerOutput:
    """Return a step; ``cached`` gives the start and the new blocks of requests that ran before."""
    starts = {new.request_id: new.num_computed_tokens for new in new_reqs} | {k: v[0] for k, v in cached.items()}
    return SchedulerOutput(
        req_ids=list(counts),
        token_counts=list(counts.values()),
        starts=[starts[request_id] for request_id in counts],
        new_block_ids={request_id: blocks for request_id, (_, blocks) in cached.items() if blocks},
        scheduled_new_reqs=new_reqs,
        finished_req_ids=list(finished),
        preempted_req_ids=list(preempted),
        total_num_scheduled_tokens=sum(counts.values()),
    )


def create_batch() -> InputBatch:
    return InputBatch(max_model_len=64, block_size=4)


def test_a_whole_prompt_and_its_sampling_row() -> None:
    batch = create_batch()
    step = output({"a": 6}, [new("a", 6, [5, 2])])
    batch.apply(step)
    meta = batch.build_step(step).meta
    assert meta.token_ids.tolist() == [100, 101, 102, 103, 104, 105]
    assert meta.positions.tolist() == [0, 1, 2, 3, 4, 5]
    assert meta.slot_mapping.tolist() == [20, 21, 22, 23, 8, 9]
    assert meta.kv_indices.tolist() == [5, 2]
    assert (meta.last_page_len.tolist(), meta.kv_lens.tolist()) == ([2], [6])
    assert meta.logit_rows.tolist() == [5]


def test_a_chunk_samples_nothing_and_the_last_one_does() -> None:
    batch = create_batch()
    first = output({"a": 4}, [new("a", 6, [1])])
    batch.apply(first)
    inputs = batch.build_step(first)
    assert inputs.sampling_rows == []
    assert inputs.meta.logit_rows.tolist() == []
    last = output({"a": 2}, cached={"a": (4, [3])})
    batch.apply(last)
    inputs = batch.build_step(last)
    assert [row.request_id for row in inputs.sampling_rows] == ["a"]
    assert inputs.meta.slot_mapping.tolist() == [12, 13]
    assert inputs.meta.kv_indices.tolist() == [1, 3]


def test_decodes_come_first_and_rows_follow_them() -> None:
    batch = create_batch()
    start = output({"a": 3}, [new("a", 3, [1])])
    batch.apply(start)
    batch.build_step(start).sampling_rows[0].append_token(7)
    mixed = output({"b": 5, "a": 1}, [new("b", 5, [2, 3])], {"a": (3, [])})
    batch.apply(mixed)
    inputs = batch.build_step(mixed)
    assert [row.request_id for row in inputs.sampling_rows] == ["a", "b"]
    assert inputs.sampling_lines == [1, 0]
    assert inputs.meta.num_decodes == 1
    assert inputs.meta.qo_indptr.tolist() == [0, 1, 6]
    assert inputs.meta.token_ids.tolist()[:2] == [7, 100]
    assert inputs.meta.kv_indptr.tolist() == [0, 1, 3]
    assert inputs.meta.logit_rows.tolist() == [0, 5]
    assert inputs.meta.kv_lens.tolist() == [4, 5]


def test_a_prefix_hit_starts_in_the_middle() -> None:
    batch = create_batch()
    step = output({"a": 2}, [new("a", 10, [9, 8, 7], computed=8)])
    batch.apply(step)
    meta = batch.build_step(step).meta
    assert meta.positions.tolist() == [8, 9]
    assert meta.slot_mapping.tolist() == [28, 29]
    assert (meta.kv_lens.tolist(), meta.kv_indices.tolist()) == ([10], [9, 8, 7])


def test_rows_leave_on_finish_and_preemption_and_come_back_whole() -> None:
    batch = create_batch()
    batch.apply(output({"a": 3, "b": 3}, [new("a", 3, [1]), new("b", 3, [2])]))
    batch.apply(output({}, finished=("a",), preempted=("b",)))
    assert len(batch) == 0
    resumed = output({"b": 5}, [new("b", 5, [4, 6], prompt=3)])
    batch.apply(resumed)
    row = batch.build_step(resumed).sampling_rows[0]
    assert (row.num_output_tokens, row.blocks(2).tolist()) == (2, [4, 6])


def test_a_token_that_only_the_device_knows_is_the_complement_of_its_rows_slot() -> None:
    batch = create_batch()
    start = output({"a": 3, "b": 2}, [new("a", 3, [1]), new("b", 2, [2])])
    batch.apply(start)
    rows = batch.build_step(start).sampling_rows
    assert [row.slot for row in rows] == [0, 1]
    assert [row.append_unknown() for row in rows] == [3, 2]
    following = output({"a": 1, "b": 1}, cached={"a": (3, []), "b": (2, [])})
    batch.apply(following)
    inputs = batch.build_step(following)
    assert inputs.meta.token_ids.tolist() == [~0, ~1]
    assert [row.num_output_tokens for row in inputs.sampling_rows] == [1, 1], "the output index counts it"
    rows[1].set_token(2, 77)
    assert batch.build_step(following).meta.token_ids.tolist() == [~0, 77]


def test_slots_are_nobody_elses_and_come_back() -> None:
    batch = create_batch()
    batch.apply(output({"a": 1, "b": 1, "c": 1}, [new(each, 1, [1]) for each in "abc"]))
    batch.apply(output({"d": 1, "e": 1}, [new(each, 1, [1]) for each in "de"], finished=("b", "x"), preempted=("a",)))
    batch.apply(output({"e": 1}, [new("e", 1, [1])]))  # with a new state, in its old slot
    step = output(dict.fromkeys("cde", 1), cached={each: (0, []) for each in "cde"})
    slots = [row.slot for row in batch.build_step(step).sampling_rows]
    assert slots[0] == 2 and sorted(slots) == [0, 1, 2]


@pytest.mark.parametrize(
    ("sampling", "num_outputs", "on_host", "on_device"),
    [
        ({"temperature": 0.0}, 0, False, False),
        ({"temperature": 1.0}, 0, True, False),
        ({"temperature": 1.0, "top_k": 5, "top_p": 0.5, "min_p": 0.1}, 0, True, False),
        ({"temperature": 0.0, "min_tokens": 2}, 1, True, True),
        ({"temperature": 0.0, "min_tokens": 2}, 2, True, False),
        ({"temperature": 0.0, "repetition_penalty": 1.1}, 0, True, True),
        ({"temperature": 0.0, "frequency_penalty": 0.1}, 0, True, True),
        ({"temperature": 0.0, "presence_penalty": -0.1}, 0, True, True),
        ({"temperature": 0.0, "logit_bias": {3: 1.0}}, 0, True, True),
        ({"temperature": 0.0, "num_logprobs": 0}, 0, True, True),
    ],
)
def test_whose_logits_are_needed(sampling: dict[str, Any], num_outputs: int, on_host: bool, on_device: bool) -> None:
    for picks_on_device, expected in ((False, on_host), (True, on_device)):
        batch = InputBatch(max_model_len=64, block_size=4, picks_on_device=picks_on_device)
        tokens = list(range(3 + num_outputs))
        data = NewRequestData("a", tokens, 3, SamplingParams(max_tokens=9, **sampling), [1, 2], 0)
        step = output({"a": len(tokens)}, [data])
        batch.apply(step)
        assert batch.build_step(step).needs_logits.tolist() == [expected]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 20])
def test_a_run_of_prompt_logits_is_cut_where_the_rows_are(size: int) -> None:
    """Rows 4 to 8 of 12, which come so many at a time."""
    row: Any = object()
    run, read = PromptLogits(row, 4, np.arange(100, 105, dtype=np.int32)), {}
    for first in range(0, 12, size):
        part = run.within(first, first + size)
        assert part.row is row
        for index, token_id in enumerate(part.token_ids.tolist(), start=part.first_logits):
            assert 0 <= index < size
            read[first + index] = token_id
    assert read == {4: 100, 5: 101, 6: 102, 7: 103, 8: 104}


@pytest.mark.parametrize(
    ("params", "needs_logits"),
    [
        ({}, False),
        ({"temperature": 0.7}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"logit_bias": {3: 1.0}}, True),
        ({"min_tokens": 1}, True),
        ({"num_logprobs": 0}, True),
        ({"top_k": 5, "top_p": 0.5, "min_p": 0.1, "seed": 3}, False),
    ],
)
def test_only_a_row_that_takes_its_likeliest_token_needs_no_logits(params: dict[str, Any], needs_logits: bool) -> None:
    batch = create_batch()
    asked = SamplingParams(**{"max_tokens": 20, "temperature": 0.0, **params})
    step = output({"a": 3}, [NewRequestData("a", [100, 101, 102], 3, asked, [5], 0)])
    batch.apply(step)
    assert batch.build_step(step).needs_logits.tolist() == [needs_logits]


def test_the_rows_of_a_prompt_need_logits_though_its_request_is_greedy() -> None:
    batch = create_batch()
    asked = SamplingParams(max_tokens=20, temperature=0.0, num_prompt_logprobs=1)
    step = output({"a": 3}, [NewRequestData("a", [100, 101, 102], 3, asked, [5], 0)])
    batch.apply(step)
    assert batch.build_step(step).needs_logits.tolist() == [True, True, False]


def test_a_row_that_came_last_though_it_is_one_token_long_stands_among_the_others() -> None:
    batch = create_batch()
    step = output({"a": 1, "b": 3, "c": 1}, [new("a", 1, [5]), new("b", 3, [6]), new("c", 2, [7], computed=1)])
    batch.apply(step)
    built = batch.build_step(step)
    assert built.meta.num_decodes == 2
    assert built.meta.slot_mapping.tolist() == [20, 29, 24, 25, 26]
    assert built.sampling_lines == [0, 2, 1]


def test_what_all_rows_share_is_told_to_the_kernels() -> None:
    batch = create_batch()
    step = output({"a": 1, "b": 1}, [new("a", 5, [5, 6], computed=4), new("b", 5, [5, 7], computed=4)])
    step.num_common_prefix_blocks = 1
    batch.apply(step)
    assert batch.build_step(step).meta.num_common_pages == 1
