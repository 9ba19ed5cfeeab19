"""Drafts as far as the scheduler goes: R2, S3h, U4, K7a, L4, SD8, SD9. A draft of -1 is left to the runner."""

from __future__ import annotations

from typing import Any

import pytest

from engine_core.messages import FinishReason
from tests.engine_core.scheduler.scenario_helpers import (
    SitOut,
    abort_all,
    foretell,
    other_than,
    propose,
    run_to_end,
)
from tests.engine_core.scheduler.scheduler_helpers import Harness, create_scheduler


def drafts_in(h: Harness) -> dict[str, list[int]]:
    """Return the drafts that the last step computes."""
    assert h.output is not None
    return h.output.scheduled_spec_decode_tokens


def run_drafting(h: Harness, num_drafts: int) -> int:
    """Propose before every step until all have ended; return the preemptions on the way."""
    num_preempted = 0
    while h.scheduler.has_unfinished_requests():
        propose(h, num_drafts)
        h.step()
        assert h.output is not None
        num_preempted += len(h.output.preempted_req_ids)
    return num_preempted


# ---------------------------------------------------------------------------- proposing


def test_r2_drafts_count_as_tokens_to_compute() -> None:
    h = Harness(create_scheduler())
    h.add("A", 6, 9)
    h.step()
    request = h.scheduler.requests["A"]
    for drafts in ([1, 2, 3], [4], []):  # the last proposal counts
        h.scheduler.set_draft_token_ids({"A": drafts})
        assert (request.num_tokens, request.num_tokens_with_spec) == (7, 7 + len(drafts))
        h.scheduler.check_invariants()
    h.scheduler.set_draft_token_ids({"A": [5, 6]})
    assert h.step() == {"A": 3} and drafts_in(h) == {"A": [5, 6]}
    abort_all(h)


def test_sd2_proposals_for_those_that_cannot_use_them_are_ignored() -> None:
    h = Harness(create_scheduler(num_blocks=4, block_size=4, max_num_batched_tokens=14, max_num_seqs=4))
    h.add("A", 7, 6)
    h.add("B", 7, 6)
    h.add("C", 9, 2)
    for _ in range(3):
        h.step()
    assert h.output is not None and h.output.preempted_req_ids == ["B"]
    h.scheduler.set_draft_token_ids({"B": [1, 2], "C": [1], "nobody": [1]})
    assert [h.scheduler.requests[id_].num_tokens_with_spec for id_ in "BC"] == [9, 9]
    run_to_end(h)


def test_sd2_a_waiting_request_takes_no_drafts_however_short_its_prompt() -> None:
    h = Harness(create_scheduler())
    h.add("A", 1, 9)
    h.scheduler.set_draft_token_ids({"A": [1, 2]})
    h.scheduler.check_invariants()
    assert h.step() == {"A": 1} and drafts_in(h) == {}
    abort_all(h)


def test_sd2_a_prompt_that_is_not_computed_takes_no_drafts() -> None:
    h = Harness(create_scheduler(max_num_batched_tokens=8, max_num_seqs=8))
    h.add("A", 20, 2)
    for expected in ({"A": 8}, {"A": 8}, {"A": 4}):
        propose(h, 3, "A")
        assert h.step() == expected and drafts_in(h) == {}
    abort_all(h)


# ---------------------------------------------------------------------------- scheduling


@pytest.mark.parametrize(
    ("limit", "num_tokens"), [({"max_chunk_size": 3}, 3), ({"max_num_batched_tokens": 2}, 2), ({}, 4)]
)
def test_s3h_b3_limits_cut_drafts(limit: dict[str, Any], num_tokens: int) -> None:
    h = Harness(create_scheduler(max_num_seqs=2, **limit))
    h.add("A", 2, 20)
    h.step()
    h.scheduler.set_draft_token_ids({"A": [1, 2, 3]})
    assert h.step() == {"A": num_tokens} and drafts_in(h) == {"A": [1, 2, 3][: num_tokens - 1]}
    assert h.scheduler.requests["A"].draft_token_ids == []
    assert h.step() == {"A": 1} and drafts_in(h) == {}
    abort_all(h)


def test_s3h_drafts_wait_with_their_request() -> None:
    sit_out = SitOut()
    h = Harness(create_scheduler(constraints=[sit_out]))
    h.add("A", 6, 9)
    h.add("B", 6, 9)
    h.step()
    h.scheduler.set_draft_token_ids({"A": [1, 2, 3], "B": [4, 5]})
    sit_out.request_ids.add("B")
    assert h.step() == {"A": 4}
    sit_out.request_ids.clear()
    assert h.step() == {"A": 1, "B": 3} and drafts_in(h) == {"B": [4, 5]}
    abort_all(h)


def test_b1_drafts_cost_budget() -> None:
    h = Harness(create_scheduler(max_num_batched_tokens=6, max_num_seqs=3))
    h.add("A", 3, 9)
    h.step()
    propose(h, 3, "A")
    h.add("B", 6, 2)
    assert h.step() == {"A": 4, "B": 2}
    abort_all(h)


@pytest.mark.parametrize("num_left", [1, 2, 3, 5])
def test_sd8_drafts_that_the_end_cuts_off_are_not_scheduled(num_left: int) -> None:
    h = Harness(create_scheduler())
    h.add("A", 6, 1 + num_left)
    h.step()
    h.scheduler.set_draft_token_ids({"A": [1, 2, 3]})
    assert h.step() == {"A": min(num_left, 4)}
    assert len(drafts_in(h).get("A", [])) == min(num_left - 1, 3)
    abort_all(h)


# ------------------------------------------------------------------------------- results


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
def test_u4_rejected_drafts_are_taken_back(num_right: int) -> None:
    h = Harness(create_scheduler(block_size=4))
    prompt = list(range(5))
    truth = foretell(prompt, 12)
    h.add("A", prompt, 12)
    h.step()
    wrong = [other_than(token_id) for token_id in truth[1:4]]
    h.scheduler.set_draft_token_ids({"A": [*truth[1 : 1 + num_right], *wrong[num_right:]]})
    assert h.step() == {"A": 4}
    request = h.scheduler.requests["A"]
    assert h.token_ids["A"] == truth[: 2 + num_right]
    assert (request.num_tokens, request.num_computed_tokens) == (7 + num_right, 6 + num_right)
    assert request.num_tokens_with_spec == request.num_tokens
    assert h.step() == {"A": 1}
    assert h.output is not None and h.output.starts == [6 + num_right]
    stats = h.scheduler.make_stats()
    assert (stats.num_drafts, stats.num_draft_tokens) == (1, 3)
    assert list(stats.num_accepted_tokens) == [1] * num_right
    run_to_end(h)
    assert h.token_ids["A"] == truth


def test_l2_blocks_of_rejected_drafts_are_kept() -> None:
    h = Harness(create_scheduler(block_size=4))
    prompt = list(range(6))
    h.add("A", prompt, 9)
    h.step()
    h.scheduler.set_draft_token_ids({"A": [other_than(foretell(prompt, 2)[1]), 1, 2]})
    h.step()
    table = list(h.table("A"))
    assert len(table) == 3 and h.scheduler.requests["A"].num_computed_tokens == 7
    for _ in range(5):
        assert h.step() == {"A": 1} and h.table("A") == table
        assert h.output is not None and h.output.new_block_ids == {}
    run_to_end(h)


def test_k7a_no_draft_is_ever_found_in_the_cache() -> None:
    h = Harness(create_scheduler(block_size=4))
    prompt = list(range(7))
    truth = foretell(prompt, 9)
    h.add("A", prompt, 9)
    h.step()
    assert h.schedule() == {"A": 1}
    h.update()
    drafts = [other_than(truth[2]), 1, 2]
    h.scheduler.set_draft_token_ids({"A": drafts})
    assert h.schedule() == {"A": 4}  # the third block would be full, were they right
    h.add("B", [*prompt, truth[0], truth[1], *drafts, 5], 1)
    h.update()
    assert h.step()["B"] == 13 - 8
    h.add("C", [*prompt, truth[0], truth[1], *drafts, 5], 1)
    run_to_end(h)
    assert h.last["C"].num_cached_tokens == 12, "B's prompt, which is no draft"
    assert h.token_ids["A"] == truth


def test_k7a_right_drafts_are_registered_when_they_are_known() -> None:
    h = Harness(create_scheduler(block_size=4))
    prompt = list(range(6))
    truth = foretell(prompt, 9)
    h.add("A", prompt, 9)
    h.step()
    h.scheduler.set_draft_token_ids({"A": truth[1:4]})
    assert h.schedule() == {"A": 4}
    assert len(h.scheduler.kv_cache.pool.index) == 1
    h.update()
    assert len(h.scheduler.kv_cache.pool.index) == 2
    abort_all(h)


def test_u5_sd8_an_end_within_the_accepted_drafts_drops_the_rest() -> None:
    h = Harness(create_scheduler(block_size=4))
    prompt = list(range(6))
    truth = foretell(prompt, 6)
    h.add("A", prompt, 20, stop_token_ids=frozenset(truth[2:3]))
    h.step()
    h.scheduler.set_draft_token_ids({"A": truth[1:5]})
    assert h.step() == {"A": 5}
    assert h.last["A"].new_token_ids == truth[1:3] and h.last["A"].finish_reason is FinishReason.STOP
    run_to_end(h)


# ---------------------------------------------------------------------------- preemption


def test_l4_nobody_is_preempted_for_drafts() -> None:
    h = Harness(create_scheduler(num_blocks=4, block_size=4))
    h.add("A", 7, 6)
    h.add("B", 7, 6)
    h.step()
    propose(h, 3)
    assert h.step() == {"A": 1, "B": 1} and drafts_in(h) == {}
    assert h.output is not None and h.output.preempted_req_ids == []
    propose(h, 3)
    assert h.step() == {"A": 1}, "now A needs a block for a token that is none"
    assert h.output.preempted_req_ids == ["B"]
    run_to_end(h)


def test_sd9_a_preemption_forgets_drafts() -> None:
    h = Harness(create_scheduler(num_blocks=4, block_size=4))
    h.add("A", 7, 6)
    h.add("B", 7, 6)
    h.step()
    h.step()
    h.scheduler.set_draft_token_ids({"B": [1, 2, 3]})
    assert h.step() == {"A": 1}
    request = h.scheduler.requests["B"]
    assert h.output is not None and h.output.preempted_req_ids == ["B"]
    assert request.draft_token_ids == [] and request.num_tokens_with_spec == request.num_tokens == 9
    while h.has_work:
        h.step()
        assert drafts_in(h) == {}
    abort_all(h)


@pytest.mark.parametrize("is_reset", [True, False])
def test_sd9_x7_a_reset_or_an_abort_forgets_drafts(is_reset: bool) -> None:
    h = Harness(create_scheduler(block_size=4))
    h.add("A", 6, 9)
    h.step()
    propose(h, 3)
    if is_reset:
        assert h.scheduler.reset_prefix_cache(reset_running=True)
        assert h.step() == {"A": 7} and drafts_in(h) == {}
    abort_all(h)


# ----------------------------------------------------------------------------- sameness


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("num_blocks", [64, 14])
def test_i15_tokens_are_the_same_with_drafts_at_any_depth(depth: int, num_blocks: int) -> None:
    h = Harness(create_scheduler(num_blocks=num_blocks, block_size=4, max_num_seqs=6, max_steps_in_flight=depth))
    prompts = {str(i): [*range(i + 3), i] for i in range(6)}
    for request_id, prompt in prompts.items():
        h.add(request_id, prompt, 21, seed=len(prompt))
    num_preempted = run_drafting(h, 3)
    run_to_end(h)
    assert h.token_ids == {id_: foretell(prompt, 21, seed=len(prompt)) for id_, prompt in prompts.items()}
    assert (num_preempted > 0) == (num_blocks < 64)


@pytest.mark.parametrize("depth", [2, 3])
def test_x2_drafts_in_flight_count_as_tokens_being_sampled(depth: int) -> None:
    h = Harness(create_scheduler(max_steps_in_flight=depth))
    h.add("A", 6, 40)
    starts = []
    for _ in range(depth):
        h.schedule()
        assert h.output is not None
        starts += h.output.starts
        propose(h, 3)
    # An upper bound: as if every draft were right.
    assert starts == [0, *(6 + 4 * i for i in range(depth - 1))]
    assert h.scheduler.requests["A"].num_tokens_with_spec == 6 + 1 + 4 * (depth - 1) + 3
    run_to_end(h)
    assert len(h.token_ids["A"]) == 40


def test_accepted_drafts_save_steps() -> None:
    h = Harness(create_scheduler())
    h.add("A", 6, 40)
    run_drafting(h, 3)
    run_to_end(h)
    assert len(h.token_ids["A"]) == 40 and h.runner.num_executed_steps < 25


def test_a_request_decodes_plainly_again_after_its_drafts() -> None:
    h = Harness(create_scheduler(block_size=4))
    prompt = list(range(6))
    h.add("A", prompt, 20)
    h.step()
    h.step()
    propose(h, 2)
    assert h.step() == {"A": 3}
    for _ in range(3):
        assert h.step() == {"A": 1}
        assert h.scheduler.requests["A"].decode_until > 0
    run_to_end(h)
    assert h.token_ids["A"] == foretell(prompt, 20)
