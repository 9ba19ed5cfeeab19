"""Several steps in flight (scheduler.md 1.12): what may run ahead, what is wasted, what is delivered, what is dropped.

The depth is the number of steps in flight: one more than the D of the rules. "In flight" in a test's name: the event
comes between schedule() and update_from_output().
"""

from __future__ import annotations

from typing import Any

import pytest

from engine_core.messages import FinishReason
from engine_core.request import RequestStatus
from tests.engine_core.scheduler.scenario_helpers import (
    abort_all,
    create_lower_first,
    foretell,
    propose,
    run_to_end,
)
from tests.engine_core.scheduler.scheduler_helpers import Harness, create_scheduler

all_depths = pytest.mark.parametrize("depth", [1, 2, 3, 4])
overlapping_depths = pytest.mark.parametrize("depth", [2, 3, 4])


def park_b(max_tokens: int = 6, **params: object) -> Harness:
    """Return a harness after G19's third schedule(): B is preempted and its second token in flight."""
    h = Harness(create_scheduler(num_blocks=4, block_size=4, max_steps_in_flight=2))
    h.add("A", range(7), 6)
    h.add("B", range(10, 17), max_tokens, **params)
    h.step()
    h.step()
    assert h.schedule() == {"A": 1}
    assert h.output is not None and h.output.preempted_req_ids == ["B"]
    assert list(h.scheduler.parked) == ["B"]
    return h


# -------------------------------------------------------------------------- running ahead


@all_depths
def test_x1_no_step_is_scheduled_beyond_the_depth(depth: int) -> None:
    h = Harness(create_scheduler(max_steps_in_flight=depth))
    h.add("A", 5, 20)
    assert [h.schedule() for _ in range(depth + 2)] == [{"A": 5}, *[{"A": 1}] * (depth - 1), {}, {}]
    assert h.scheduler.num_steps_in_flight == depth
    h.update()
    assert [h.schedule(), h.schedule()] == [{"A": 1}, {}]
    abort_all(h)


@overlapping_depths
def test_x1_a_full_pipeline_is_no_stall(depth: int) -> None:
    h = Harness(create_scheduler(max_steps_in_flight=depth))
    h.add("A", 5, 20)
    for _ in range(depth + 5):
        h.schedule()
    assert h.scheduler.make_stats().num_stalls == 0 and "A" in h.scheduler.requests
    abort_all(h)


@overlapping_depths
def test_x2_r4_tokens_being_sampled_count_as_known(depth: int) -> None:
    h = Harness(create_scheduler(max_steps_in_flight=depth))
    h.add("A", 5, 20)
    request = h.scheduler.requests["A"]
    for num_being_sampled in range(1, depth + 1):
        h.schedule()
        assert h.output is not None and h.output.starts == [0 if num_being_sampled == 1 else 3 + num_being_sampled]
        assert (request.num_tokens, request.num_tokens_with_spec) == (5, 5 + num_being_sampled)
    h.update()
    assert (request.num_tokens, request.num_tokens_with_spec) == (6, 5 + depth)
    abort_all(h)


def test_x2_r5_a_chunk_that_samples_nothing_promises_nothing() -> None:
    h = Harness(create_scheduler(max_num_batched_tokens=8, max_num_seqs=8, max_steps_in_flight=4))
    h.add("A", 20, 3)
    request = h.scheduler.requests["A"]
    lengths = []
    for _ in range(4):
        h.schedule()
        lengths.append(request.num_tokens_with_spec)
    assert lengths == [20, 20, 21, 22] and request.num_computed_tokens == 21
    abort_all(h)


@overlapping_depths
def test_x3_k7_a_block_is_not_registered_before_its_last_token_is_known(depth: int) -> None:
    h = Harness(create_scheduler(block_size=4, max_steps_in_flight=depth))
    prompt = list(range(7))
    truth = foretell(prompt, 9)
    h.add("A", prompt, 9)
    h.schedule()
    h.schedule()  # writes the eighth slot, with a token that only the runner will know
    index = h.scheduler.kv_cache.pool.index
    assert h.scheduler.requests["A"].num_computed_tokens == 8 and list(index.values()) == h.table("A")[:1]
    h.update()
    h.update()
    assert list(index.values()) == h.table("A")[:2]
    h.add("B", [*prompt, truth[0], 3], 1)
    h.schedule()
    assert h.output is not None and h.output.num_scheduled_tokens["B"] == 1
    abort_all(h)


# -------------------------------------------------------------------------------- overshoot


@all_depths
@pytest.mark.parametrize("ends", ["eos_token_ids", "stop_token_ids"])
def test_x4_an_unforeseen_end_wastes_exactly_the_steps_in_flight(depth: int, ends: str) -> None:
    h = Harness(create_scheduler(max_steps_in_flight=depth))
    prompt = list(range(20))
    truth = foretell(prompt, 3)
    h.add("A", prompt, 20, **{ends: frozenset(truth[2:3])})
    assert run_to_end(h) == [{"A": 20}, {"A": 1}, {"A": 1}, *[{"A": 1}] * (depth - 1)]
    assert h.token_ids["A"] == truth and h.last["A"].finish_reason is FinishReason.STOP


@all_depths
@pytest.mark.parametrize(
    ("max_tokens", "max_model_len", "num_blocks", "num_outputs"), [(3, 99, 64, 3), (50, 10, 64, 4), (50, 99, 2, 3)]
)
def test_s3b_x4_a_length_never_overshoots(
    depth: int, max_tokens: int, max_model_len: int, num_blocks: int, num_outputs: int
) -> None:
    config: dict[str, Any] = {"num_blocks": num_blocks, "block_size": 4, "max_model_len": max_model_len}
    h = Harness(create_scheduler(max_steps_in_flight=depth, **config))
    h.add("X", 6, max_tokens)
    assert run_to_end(h) == [{"X": 6}, *[{"X": 1}] * (num_outputs - 1)]
    assert len(h.token_ids["X"]) == num_outputs and h.last["X"].finish_reason is FinishReason.LENGTH


@all_depths
def test_s3b_a_request_that_is_certain_to_end_does_not_hold_up_others(depth: int) -> None:
    h = Harness(create_scheduler(max_num_seqs=1, max_steps_in_flight=depth))
    h.add("A", 5, 2)
    h.add("B", 5, 2)
    assert run_to_end(h) == [{"A": 5}, {"A": 1}, {"B": 5}, {"B": 1}]


def test_x5_blocks_of_a_finished_request_are_reused_under_an_overshooting_step() -> None:
    h = Harness(create_scheduler(num_blocks=3, block_size=4, max_steps_in_flight=2))
    prompt = list(range(8))
    h.add("A", prompt, 4, eos_token_ids=frozenset(foretell(prompt, 2)[1:]))
    h.step()
    h.step()
    assert h.schedule() == {"A": 1}  # wasted; it will write to A's third block
    third = h.table("A")[2]
    h.update()
    assert "A" in h.last
    h.add("B", 11, 2)
    assert h.schedule() == {"B": 11} and third in h.table("B")
    run_to_end(h)  # the steps run now, in order; a wrong read would be noticed


def test_x6_what_an_overshooting_step_writes_is_never_found() -> None:
    h = Harness(create_scheduler(block_size=4, max_steps_in_flight=2))
    prompt = list(range(7))
    (end,) = foretell(prompt, 1)
    h.add("A", prompt, 9, eos_token_ids=frozenset({end}))
    h.step()
    assert h.step() == {"A": 1} and "A" in h.last  # it fills the second block, for nobody
    h.add("B", [*prompt, end, 3], 2)
    assert h.step() == {"B": 5}
    run_to_end(h)
    assert h.last["B"].num_cached_tokens == 4


# ------------------------------------------------------------------- aborts, all in flight


@all_depths
def test_x4_u3_an_abort_in_flight_ends_at_once_and_brings_nothing(depth: int) -> None:
    h = Harness(create_scheduler(max_steps_in_flight=depth))
    h.add("A", 5, 20)
    h.add("B", 5, 4)
    for _ in range(depth):
        h.schedule()
    h.abort("A")
    assert h.last["A"].finish_reason is FinishReason.ABORT and h.free == 63
    for _ in range(depth):
        h.update()
    assert h.token_ids["A"] == [] and len(h.token_ids["B"]) == depth
    run_to_end(h)


@overlapping_depths
def test_o5_a_new_request_with_an_old_id_gets_nothing_of_the_old_ones_results(depth: int) -> None:
    h = Harness(create_scheduler(max_steps_in_flight=depth))
    h.add("A", 5, 20)
    for _ in range(depth - 1):
        h.schedule()
    h.scheduler.abort_requests(["A"])
    prompt = list(range(6))
    h.add("A", prompt, 3)
    assert h.schedule() == {"A": 6}
    for _ in range(depth - 1):
        h.update()
    assert h.token_ids["A"] == []
    h.update()
    assert h.token_ids["A"] == foretell(prompt, 1)
    while h.scheduler.has_unfinished_requests():
        h.step()
    assert h.token_ids["A"] == foretell(prompt, 3)


def test_v9_f_an_abort_of_a_parked_request_ends_it_once() -> None:
    h = park_b()
    h.abort("B")
    assert not h.scheduler.parked and "B" not in h.scheduler.waiting
    num_tokens = len(h.token_ids["B"])
    h.update()
    assert len(h.token_ids["B"]) == num_tokens and h.last["B"].finish_reason is FinishReason.ABORT
    run_to_end(h)
    assert h.token_ids["A"] == foretell(range(7), 6)


# --------------------------------------------------------------------- preempted in flight


@pytest.mark.parametrize("is_stopped", [True, False])
def test_v9_a_token_in_flight_may_end_a_preempted_request(is_stopped: bool) -> None:
    truth = foretell(range(10, 17), 2)
    h = park_b(9, eos_token_ids=frozenset(truth[1:])) if is_stopped else park_b(2)
    assert h.scheduler.requests["B"].status is RequestStatus.PREEMPTED
    h.update()
    reason = FinishReason.STOP if is_stopped else FinishReason.LENGTH
    assert h.last["B"].finish_reason is reason and h.token_ids["B"] == truth
    assert not h.scheduler.parked and "B" not in h.scheduler.waiting
    assert all("B" not in step for step in run_to_end(h))


def test_v9_a_failure_in_flight_ends_a_preempted_request() -> None:
    h = park_b()
    h.runner.failing_ids.add("B")
    h.update()
    assert h.last["B"].finish_reason is FinishReason.ERROR and not h.scheduler.parked
    run_to_end(h)
    assert h.token_ids["A"] == foretell(range(7), 6)


def test_u13_kv_of_a_request_that_failed_while_preempted_is_not_reused() -> None:
    h = Harness(create_scheduler(num_blocks=4, block_size=4, max_steps_in_flight=2))
    prompt = list(range(7))
    h.add("A", 7, 9)
    h.step()
    h.add("bad", prompt, 9)
    assert h.step() == {"A": 1, "bad": 7}
    assert h.schedule() == {"A": 1}
    assert h.output is not None and h.output.preempted_req_ids == ["bad"]
    h.runner.failing_ids.add("bad")
    h.update()
    assert h.last["bad"].finish_reason is FinishReason.ERROR
    h.abort("A")
    h.add("again", prompt, 1)
    assert h.schedule() == {"again": 7}, "no block of the failed step is found"
    abort_all(h)


def test_u13_kv_of_a_request_that_failed_after_its_abort_is_not_reused() -> None:
    h = Harness(create_scheduler(block_size=4))
    prompt = list(range(7))
    h.add("bad", prompt, 9)
    assert h.schedule() == {"bad": 7}
    h.runner.failing_ids.add("bad")
    h.abort("bad")
    h.update()
    assert h.last["bad"].finish_reason is FinishReason.ABORT
    h.add("again", prompt, 1)
    assert h.schedule() == {"again": 7}, "no block of the failed step is found"
    abort_all(h)


def test_v9_q4_a_parked_request_is_not_admitted_and_holds_up_nobody() -> None:
    h = Harness(create_scheduler(num_blocks=4, block_size=4, max_steps_in_flight=3))
    h.add("A", 7, 9)
    h.add("B", 7, 9)
    assert [h.step(), h.step()] == [{"A": 7, "B": 7}, {"A": 1, "B": 1}]
    assert h.step() == {"A": 1}  # B is preempted with two steps in flight, and one of them comes in
    request = h.scheduler.requests["B"]
    assert request.num_steps_to_drain == 1 and len(h.token_ids["B"]) == 1 and h.free == 1
    h.add("N", 1, 9)
    assert h.step() == {"A": 1, "N": 1}
    assert len(h.token_ids["B"]) == 2 and not h.scheduler.parked
    # Drained, it stands before all that came after it.
    h.add("M", 1, 9)
    h.abort("N")
    assert h.scheduler.waiting.peek() is request
    abort_all(h)


def test_v9_a_prompt_chunk_in_flight_drains_without_a_token() -> None:
    config: dict[str, Any] = {"num_blocks": 5, "block_size": 4, "max_num_batched_tokens": 9, "max_num_seqs": 4}
    h = Harness(create_scheduler(max_steps_in_flight=2, full_prompt_gate=False, **config))
    h.add("A", 7, 9)
    assert h.step() == {"A": 7}
    prompt = list(range(20))
    h.add("V", prompt, 1)
    assert h.step() == {"A": 1, "V": 8}
    assert h.schedule() == {"A": 1}
    assert "V" in h.scheduler.parked
    h.update()
    assert h.token_ids["V"] == [] and "V" in h.scheduler.waiting
    run_to_end(h)
    assert h.token_ids["V"] == foretell(prompt, 1)


@overlapping_depths
def test_v9_the_least_urgent_is_parked_when_a_more_urgent_one_takes_its_seat(depth: int) -> None:
    h = Harness(create_lower_first(max_num_seqs=1, max_steps_in_flight=depth))
    prompt = list(range(7))
    h.add("L", prompt, 9, priority=5)
    for _ in range(depth - 1):
        h.schedule()
    h.add("H", 5, 2, priority=0)
    assert h.schedule() == {"H": 5} and list(h.scheduler.parked) == ["L"]
    run_to_end(h)
    assert h.token_ids["L"] == foretell(prompt, 9) and len(h.token_ids["H"]) == 2


# --------------------------------------------------------------------------------- dropped


@pytest.mark.parametrize(("depth", "num_drafts"), [(1, 0), (1, 3), (2, 0), (2, 3), (3, 0), (3, 3), (4, 0)])
def test_x7_k12_a_reset_drops_what_is_in_flight_and_samples_it_again(depth: int, num_drafts: int) -> None:
    h = Harness(create_scheduler(block_size=4, max_steps_in_flight=depth))
    prompts = {"A": list(range(9)), "B": list(range(3, 9))}
    for request_id, prompt in prompts.items():
        h.add(request_id, prompt, 9)
    for _ in range(depth):
        propose(h, num_drafts)
        h.schedule()
    assert h.scheduler.reset_prefix_cache(reset_running=True)
    h.scheduler.check_invariants()
    assert h.free == 64 and not h.scheduler.kv_cache.pool.index and not h.scheduler.parked
    while h.in_flight:
        h.update()
    assert h.token_ids == {"A": [], "B": []}, "in flight, hence dropped"
    assert h.schedule() == {"A": 9, "B": 6}
    assert h.output is not None and h.output.preempted_req_ids == ["B", "A"]
    assert [(new.resumed, new.num_computed_tokens) for new in h.output.scheduled_new_reqs] == [(True, 0)] * 2
    run_to_end(h)
    assert h.token_ids == {request_id: foretell(prompt, 9) for request_id, prompt in prompts.items()}


def test_x7_requests_come_back_before_their_dropped_steps_have_ended() -> None:
    h = Harness(create_scheduler(block_size=4, max_steps_in_flight=3))
    prompt = list(range(6))
    h.add("A", prompt, 5)
    h.schedule()
    h.schedule()
    assert h.scheduler.reset_prefix_cache(reset_running=True)
    assert h.schedule() == {"A": 6}  # two dropped steps in flight, and its own
    h.update()
    h.update()
    assert h.token_ids["A"] == []
    run_to_end(h)
    assert h.token_ids["A"] == foretell(prompt, 5)


def test_x7_v9_a_reset_leaves_the_output_of_a_parked_request_alone() -> None:
    h = park_b()
    assert h.scheduler.reset_prefix_cache(reset_running=True)
    h.scheduler.check_invariants()
    h.update()
    assert h.token_ids["B"] == foretell(range(10, 17), 2)
    run_to_end(h)
    assert (h.token_ids["A"], h.token_ids["B"]) == (foretell(range(7), 6), foretell(range(10, 17), 6))


def test_k12_a_reset_is_refused_while_blocks_are_owned() -> None:
    h = Harness(create_scheduler(block_size=4))
    h.add("A", 9, 2)
    h.step()
    assert not h.scheduler.reset_prefix_cache()
    assert len(h.scheduler.kv_cache.pool.index) == 2 and h.step() == {"A": 1}
    order = h.free_order
    assert h.scheduler.reset_prefix_cache()
    assert not h.scheduler.kv_cache.pool.index and h.free_order == order
    abort_all(h)


# ------------------------------------------------------------------------------- sameness


@all_depths
@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_x10_tokens_are_the_same_at_any_depth(depth: int, enable_prefix_caching: bool) -> None:
    config: dict[str, Any] = {"num_blocks": 12, "block_size": 4, "max_num_batched_tokens": 10, "max_num_seqs": 5}
    scheduler = create_scheduler(max_steps_in_flight=depth, enable_prefix_caching=enable_prefix_caching, **config)
    h = Harness(scheduler)
    prompts = {str(i): [*range(i + 3), i] for i in range(8)}
    for request_id, prompt in prompts.items():
        h.add(request_id, prompt, 20, seed=len(prompt))
    num_preempted = 0
    while h.scheduler.has_unfinished_requests():
        h.step()
        assert h.output is not None
        num_preempted += len(h.output.preempted_req_ids)
    run_to_end(h)
    assert num_preempted > 0
    assert h.token_ids == {id_: foretell(prompt, 20, seed=len(prompt)) for id_, prompt in prompts.items()}
