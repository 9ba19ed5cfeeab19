from __future__ import annotations

import pytest

from engine_core.config import SchedulerConfig
from engine_core.scheduler.constraints import build_constraints
from engine_core.scheduler.constraints.chunking import ChunkLimit, WholePrompt
from tests.engine_core.scheduler.scenario_helpers import foretell, other_than, run_to_end
from tests.engine_core.scheduler.scheduler_helpers import Harness, create_scheduler


def test_features_that_are_off_are_absent() -> None:
    assert build_constraints(SchedulerConfig(), block_size=16) == []


@pytest.mark.parametrize(("chunk", "threshold", "limit"), [(8, 0, 8), (0, 9, 9), (8, 9, 8), (9, 8, 8)])
def test_b3_the_smaller_limit_counts_and_zero_is_none(chunk: int, threshold: int, limit: int) -> None:
    config = SchedulerConfig(max_chunk_size=chunk, long_prefill_token_threshold=threshold)
    (constraint,) = build_constraints(config, block_size=16)
    assert isinstance(constraint, ChunkLimit) and constraint.max_tokens == limit


def test_chunking_off_leaves_nothing_to_limit() -> None:
    config = SchedulerConfig(max_chunk_size=8, enable_chunked_prefill=False)
    assert [type(constraint) for constraint in build_constraints(config, block_size=16)] == [WholePrompt]


def test_a3_a_whole_prompt_that_does_not_fit_stops_admission() -> None:
    h = Harness(create_scheduler(max_num_batched_tokens=20, max_num_seqs=8, enable_chunked_prefill=False))
    h.add("A", 12, 2)
    h.add("B", 12, 2)
    h.add("C", 2, 2)  # would fit beside A, but does not overtake B (Q3)
    assert h.drain() == [{"A": 12}, {"A": 1, "B": 12, "C": 2}, {"B": 1, "C": 1}]


def test_a3_a_cached_prefix_counts_as_computed() -> None:
    h = Harness(create_scheduler(max_num_batched_tokens=20, max_num_seqs=8, enable_chunked_prefill=False))
    prompt = list(range(18))
    h.add("A", prompt)
    h.drain()
    h.add("B", 15)
    h.add("C", prompt)
    assert h.step() == {"B": 15, "C": 2}


def test_r6f_chunking_off_bounds_the_prompt_by_the_step() -> None:
    scheduler = create_scheduler(max_num_batched_tokens=64, enable_chunked_prefill=False)
    assert scheduler.max_prompt_tokens == 64
    assert create_scheduler(max_num_batched_tokens=64).max_prompt_tokens == 1024


def test_max_chunk_size_cuts_a_prompt_that_is_alone() -> None:
    h = Harness(create_scheduler(max_chunk_size=7))
    h.add("A", 16, 2)
    assert h.drain() == [{"A": 7}, {"A": 7}, {"A": 2}, {"A": 1}]


def test_b3_k7a_drafts_behind_the_last_chunk_of_a_prompt_are_not_registered() -> None:
    h = Harness(create_scheduler(block_size=4, max_chunk_size=4))
    prompt = list(range(5))
    truth = foretell(prompt, 6)
    h.add("A", prompt, 6)
    assert h.step() == {"A": 4}
    h.scheduler.set_draft_token_ids({"A": [truth[0], truth[1], other_than(truth[2])]})
    assert h.step() == {"A": 4}, "the prompt's last token and three drafts, up to a block's end"
    request = h.scheduler.requests["A"]
    assert (request.num_computed_tokens, request.num_registered_blocks) == (7, 1)
    run_to_end(h)
    assert h.token_ids["A"] == truth
