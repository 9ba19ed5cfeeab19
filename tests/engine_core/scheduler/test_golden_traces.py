"""Traces taken from vLLM's own scheduler (scheduler.md appendix A); a comment says where our rules differ.

P1c, P2b, P3 and P9 are among the bug scenarios. P8 counts adapters, which come later.
"""

from __future__ import annotations

from typing import Any

import pytest

from engine_core.messages import FinishReason
from engine_core.request import RequestStatus
from engine_core.scheduler.output import ModelRunnerOutput
from tests.engine_core.scheduler.scenario_helpers import abort_all, create_lower_first, foretell, other_than, run_to_end
from tests.engine_core.scheduler.scheduler_helpers import Harness, create_request, create_scheduler


def test_g1_chunks_then_decodes() -> None:
    h = Harness(create_scheduler(num_blocks=10, max_num_batched_tokens=20, max_num_seqs=4))
    h.add("A", 50, 4)
    h.add("B", 10, 4)
    steps, free = [], []
    for _ in range(6):
        steps.append(h.schedule())
        h.update()
        free.append(h.free)
    assert steps == [{"A": 20}, {"A": 20}, {"A": 10, "B": 10}, *[{"A": 1, "B": 1}] * 3]
    assert free == [8, 7, 5, 5, 5, 10]
    assert {id_: out.finish_reason for id_, out in h.last.items()} == dict.fromkeys("AB", FinishReason.LENGTH)


def test_g2_k5_the_last_token_is_always_computed() -> None:
    h = Harness(create_scheduler(num_blocks=10))
    prompt = list(range(33))
    h.add("first", prompt)
    h.drain()
    computed = []
    for length in (33, 32, 31, 17, 16):
        h.add(f"p{length}", prompt[:length])
        computed.append(sum(sum(step.values()) for step in h.drain()))
        assert h.last[f"p{length}"].num_cached_tokens == length - computed[-1]
    assert computed == [1, 16, 15, 1, 16]


def test_g3_preempted_request_resumes_through_the_prefix_cache() -> None:
    h = Harness(create_scheduler(num_blocks=4, block_size=4))
    h.add("A", 7, 6)
    h.add("B", 7, 6)
    assert [h.step() for _ in range(2)] == [{"A": 7, "B": 7}, {"A": 1, "B": 1}]
    assert h.step() == {"A": 1}
    assert h.output is not None and h.output.preempted_req_ids == ["B"]
    assert h.free == 1
    assert [h.step() for _ in range(3)] == [{"A": 1}] * 3
    assert "A" in h.last
    assert h.step() == {"B": 5}
    (resumed,) = h.output.scheduled_new_reqs
    assert resumed.resumed and resumed.num_computed_tokens == 4 and len(resumed.token_ids) == 9
    assert [h.step() for _ in range(3)] == [{"B": 1}] * 3
    assert h.free == 4 and len(h.token_ids["A"]) == len(h.token_ids["B"]) == 6


def test_g4_a11_equal_prompts_admitted_together_share_blocks() -> None:
    h = Harness(create_scheduler())
    prompt = list(range(40))
    h.add("A", prompt, 2)
    h.add("B", prompt, 2)
    assert h.schedule() == {"A": 40, "B": 8}
    assert (h.table("A"), h.table("B")) == ([1, 2, 3], [1, 2, 4])
    h.update()
    h.drain()


@pytest.mark.parametrize("full_prompt_gate", [True, False])
def test_g5_n1_what_no_pool_can_hold_is_refused(full_prompt_gate: bool) -> None:
    # vLLM lets BIG in, and hangs. Ours knows when it is added; what just fits is served.
    h = Harness(create_scheduler(num_blocks=5, full_prompt_gate=full_prompt_gate))
    with pytest.raises(ValueError, match="KV pool 80"):
        h.scheduler.add_request(create_request("BIG", 100, 2))
    h.add("brim", 80, 2)
    h.add("small", 5, 2)
    assert run_to_end(h) == [{"brim": 80}, {"small": 5}, {"small": 1}]
    assert h.last["brim"].finish_reason is FinishReason.LENGTH


def test_g6_r7_length_ends_where_the_pool_does() -> None:
    h = Harness(create_scheduler(num_blocks=5))
    h.add("X", 60, 60)
    h.drain()
    assert h.last["X"].finish_reason is FinishReason.LENGTH
    assert 60 + len(h.token_ids["X"]) == 81


def test_g7_p5_free_order() -> None:
    h = Harness(create_scheduler(num_blocks=6))
    prompt = list(range(40))
    h.add("A", prompt)
    h.step()
    assert h.free_order == [3, 4, 5, 6, 2, 1]
    h.add("B", 16)
    h.step()
    assert h.free_order == [4, 5, 6, 2, 1, 3]
    h.add("C", prompt)
    assert h.step() == {"C": 8}
    assert h.free_order == [4, 5, 6, 3, 2, 1]


def test_g8_the_less_urgent_is_the_victim_although_it_came_first() -> None:
    h = Harness(create_lower_first(num_blocks=4))
    h.add("L", 30, 20, priority=5)
    assert h.step() == {"L": 30}
    h.add("H", 32, 20, priority=0)
    assert h.step() == {"L": 1, "H": 32} and h.free == 0
    assert h.step() == {"H": 1}
    assert h.output is not None and h.output.preempted_req_ids == ["L"]
    assert h.scheduler.requests["L"].status is RequestStatus.PREEMPTED
    abort_all(h)


def test_g8b_among_equals_the_later_arrival_is_the_victim_even_if_it_asks_itself() -> None:
    h = Harness(create_lower_first(num_blocks=4))
    h.add("A", 30, 20, priority=5)
    h.add("B", 32, 20, priority=5)
    assert h.step() == {"A": 30, "B": 32}
    assert h.step() == {"A": 1}
    assert h.output is not None and h.output.preempted_req_ids == ["B"]
    abort_all(h)


def test_g9_x4_an_end_found_late_wastes_the_steps_in_flight_only() -> None:
    h = Harness(create_scheduler(max_steps_in_flight=2))
    prompt = list(range(20))
    truth = foretell(prompt, 5)
    h.add("A", prompt, 5, eos_token_ids=frozenset({truth[1]}))
    request = h.scheduler.requests["A"]
    assert h.schedule() == {"A": 20} and request.num_tokens_with_spec - request.num_tokens == 1
    assert h.schedule() == {"A": 1}
    h.update()
    assert h.schedule() == {"A": 1}
    h.update()
    assert h.last["A"].finish_reason is FinishReason.STOP and h.free == 64
    assert h.schedule() == {}
    h.update()
    assert h.token_ids["A"] == truth[:2]
    run_to_end(h)
    assert h.runner.num_executed_steps == 3


def test_g10_b3_threshold_caps_both_phases() -> None:
    h = Harness(create_scheduler(max_num_batched_tokens=40, long_prefill_token_threshold=15, max_num_seqs=8))
    h.add("P1", 100)
    h.add("P2", 100)
    h.add("P3", 5, 2)
    steps = [h.step() for _ in range(4)]
    assert steps == [{"P1": 15, "P2": 15, "P3": 5}, {"P1": 15, "P2": 15, "P3": 1}, *[{"P1": 15, "P2": 15}] * 2]


def test_g11_q3_nothing_overtakes_a_head_that_does_not_fit() -> None:
    h = Harness(create_scheduler(num_blocks=6))
    h.add("A", 60, 3)
    h.step()
    h.add("B", 50, 2)
    h.add("C", 5, 2)
    assert [h.step() for _ in range(3)] == [{"A": 1}, {"A": 1}, {"B": 50, "C": 5}]


def test_g12_f_abort_with_a_chunk_in_flight() -> None:
    h = Harness(create_scheduler(num_blocks=10, max_num_batched_tokens=20, max_num_seqs=8))
    h.add("A", 30, 2)
    h.add("B", 30, 2)
    h.add("C", 30, 2)
    assert h.schedule() == {"A": 20}
    h.abort("A", "C")
    assert h.free == 10
    h.update()
    assert h.token_ids["A"] == []
    assert h.schedule() == {"B": 20}
    assert h.output is not None and h.output.finished_req_ids == ["A", "C"]
    h.update()
    h.drain()


def test_g13_b8_watermark_only_beside_running_requests() -> None:
    h = Harness(create_scheduler(num_blocks=19, watermark=0.2))
    h.add("A", 120, 3)
    h.step()
    h.add("B", 120, 2)
    assert [h.step() for _ in range(3)] == [{"A": 1}, {"A": 1}, {"B": 120}]


def test_g14_b2_max_num_seqs_bounds_running() -> None:
    h = Harness(create_scheduler(max_num_seqs=2))
    for request_id in "ABC":
        h.add(request_id, 10, 2)
    assert h.drain() == [{"A": 10, "B": 10}, {"A": 1, "B": 1}, {"C": 10}, {"C": 1}]


def test_g15_u4_u5_drafts_are_kept_as_far_as_they_are_right() -> None:
    h = Harness(create_scheduler(block_size=4))
    prompt = list(range(6))
    truth = foretell(prompt, 9)
    h.add("X", prompt, 9, eos_token_ids=frozenset({truth[4]}))
    h.step()
    request = h.scheduler.requests["X"]
    assert (request.num_tokens, request.num_computed_tokens) == (7, 6)
    h.scheduler.set_draft_token_ids({"X": [truth[1], other_than(truth[2]), 13]})
    assert h.step() == {"X": 4}
    assert (request.num_tokens, request.num_computed_tokens) == (9, 8)
    h.scheduler.set_draft_token_ids({"X": truth[3:6]})
    assert h.step() == {"X": 4}
    assert h.last["X"].new_token_ids == truth[3:5] and h.last["X"].finish_reason is FinishReason.STOP
    assert h.token_ids["X"] == truth[:5]
    abort_all(h)


def test_g16_s3h_drafts_that_the_budget_cuts_are_dropped() -> None:
    h = Harness(create_scheduler(max_num_batched_tokens=6, max_num_seqs=6))
    h.add("A", 3, 20)
    h.add("B", 3, 20)
    assert h.step() == {"A": 3, "B": 3}
    h.scheduler.set_draft_token_ids({"A": [1, 2, 3], "B": [4, 5, 6]})
    assert h.step() == {"A": 4, "B": 2}
    assert h.output is not None and h.output.scheduled_spec_decode_tokens == {"A": [1, 2, 3], "B": [4]}
    assert h.step() == {"A": 1, "B": 1}, "cut drafts do not come back"
    abort_all(h)


def test_g17_s3b_no_position_beyond_the_context() -> None:
    # vLLM's trace brings three tokens for one draft; a runner cannot bring more than two.
    h = Harness(create_scheduler(max_model_len=10))
    prompt = list(range(7))
    truth = foretell(prompt, 9)
    h.add("X", prompt, 20)
    h.step()
    h.scheduler.set_draft_token_ids({"X": truth[1:6]})
    assert h.step() == {"X": 2}
    assert h.output is not None and h.output.scheduled_spec_decode_tokens == {"X": truth[1:2]}
    assert h.last["X"].finish_reason is FinishReason.LENGTH and h.token_ids["X"] == truth[:3]
    abort_all(h)


@pytest.mark.parametrize(
    ("min_tokens", "eos", "sampled", "reason", "stop_token_id"),
    [
        (0, 99, [1, 2, 99], FinishReason.STOP, None),
        (0, 99, [1, 2, 98], FinishReason.STOP, 98),
        (5, 99, [1, 2, 99], FinishReason.LENGTH, None),  # vLLM goes on
        (0, 99, [1, 2, 4], FinishReason.LENGTH, None),
        (0, 98, [1, 98], FinishReason.STOP, None),
    ],
)
def test_g18_u5_what_ends_a_request(
    min_tokens: int, eos: int, sampled: list[int], reason: FinishReason, stop_token_id: int | None
) -> None:
    scheduler = create_scheduler()
    ends: dict[str, Any] = {"eos_token_ids": frozenset({eos}), "stop_token_ids": frozenset({98})}
    scheduler.add_request(create_request("X", 5, 3, min_tokens=min_tokens, **ends))
    records = []
    for token_id in sampled:
        output = scheduler.schedule(0.0)
        result = ModelRunnerOutput.of(output, {"X": [token_id]})
        records += scheduler.update_from_output(output, result).as_records()
    assert [record.new_token_ids for record in records] == [[token_id] for token_id in sampled]
    assert [record.finish_reason for record in records[:-1]] == [None] * (len(sampled) - 1)
    assert (records[-1].finish_reason, records[-1].stop_token_id) == (reason, stop_token_id)
    assert not scheduler.has_unfinished_requests()


def test_g19_v9_a_token_in_flight_of_a_preempted_request_is_delivered() -> None:
    h = Harness(create_scheduler(num_blocks=4, block_size=4, max_steps_in_flight=2))
    h.add("A", 7, 6)
    h.add("B", 7, 6)
    assert h.step() == {"A": 7, "B": 7}
    assert h.step() == {"A": 1, "B": 1} and len(h.token_ids["B"]) == 1
    assert h.schedule() == {"A": 1}
    assert h.output is not None and h.output.preempted_req_ids == ["B"]
    assert list(h.scheduler.parked) == ["B"] and len(h.scheduler.waiting) == 0
    h.update()
    request = h.scheduler.requests["B"]
    assert len(h.token_ids["B"]) == 2 and request.status is RequestStatus.PREEMPTED
    assert (request.num_computed_tokens, request.num_tokens_with_spec) == (0, 9)
    assert not h.scheduler.parked and "B" in h.scheduler.waiting
    assert [h.step() for _ in range(4)] == [{"A": 1}, {"A": 1}, {"A": 1}, {}]
    assert "A" in h.last
    assert [h.step() for _ in range(5)] == [{"B": 5}, {"B": 1}, {"B": 1}, {"B": 1}, {}]
    run_to_end(h)
    assert len(h.token_ids["A"]) == len(h.token_ids["B"]) == 6
    assert h.runner.num_executed_steps == 10


def test_g20_k11_a_hit_ends_at_the_first_missing_block() -> None:
    h = Harness(create_scheduler(num_blocks=8, block_size=4))
    prompt = list(range(16))
    h.add("A", prompt)
    h.step()
    assert h.free_order == [5, 6, 7, 8, 4, 3, 2, 1]
    h.add("X", 24)
    h.step()
    assert h.free_order == [2, 1, 3, 4, 8, 7, 6, 5]
    h.add("again", [*prompt, 7])
    assert h.schedule() == {"again": 9}
    assert h.table("again")[:2] == [1, 2]
    h.update()


def test_p4_a_preempted_request_comes_back_before_a_younger_one() -> None:
    h = Harness(create_scheduler(num_blocks=4, block_size=4))
    h.add("A", 7, 6)
    h.add("B", 7, 6)
    for _ in range(3):
        h.step()
    h.add("N", 1, 2)
    for _ in range(3):
        assert h.step() == {"A": 1}
    assert h.step() == {"B": 5, "N": 1}
    h.drain()


def test_p7_ca1_ca3_the_common_prefix_ends_when_a_stranger_joins() -> None:
    h = Harness(create_scheduler(enable_cascade_attn=True))
    stem = list(range(32))
    h.add("A", [*stem, 70], 9)
    h.step()
    h.add("B", [*stem, 71], 9)
    common = []
    for _ in range(3):
        h.step()
        assert h.output is not None
        common.append(h.output.num_common_prefix_blocks)
    h.add("stranger", 40, 9)
    for _ in range(2):  # at first it has computed nothing, then as much as the others
        h.step()
        assert h.output is not None
        common.append(h.output.num_common_prefix_blocks)
    assert common == [2, 2, 2, 0, 0]
    abort_all(h)
