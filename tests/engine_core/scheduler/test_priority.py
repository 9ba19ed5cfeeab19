"""Order of service (Q1, Q5, Q6) and making way for the more urgent (Q7). Lower numbers are urgent here, unless said."""

from __future__ import annotations

from typing import Any

import pytest

from engine_core.messages import FinishReason
from engine_core.scheduler.constraint import Verdict
from tests.engine_core.scheduler.scenario_helpers import (
    Park,
    abort_all,
    create_lower_first,
    foretell,
    preempted_in,
    run_to_end,
)
from tests.engine_core.scheduler.scheduler_helpers import Harness, create_scheduler


def running_ids(h: Harness) -> list[str]:
    return [request.request_id for request in h.scheduler.running]


# --------------------------------------------------------------------------------- order


@pytest.mark.parametrize(
    ("config", "order"),
    [
        ({"policy": "priority"}, ["five", "zero", "minus"]),  # amendment 1: higher first, unless told otherwise
        ({"policy": "priority", "priority_order": "higher-first"}, ["five", "zero", "minus"]),
        ({"policy": "priority", "priority_order": "lower-first"}, ["minus", "zero", "five"]),
        ({"policy": "fcfs"}, ["zero", "five", "minus"]),
        ({"policy": "fcfs", "priority_order": "lower-first"}, ["zero", "five", "minus"]),
    ],
)
def test_q1_amendment_1_which_end_is_urgent(config: dict[str, Any], order: list[str]) -> None:
    h = Harness(create_scheduler(max_num_seqs=1, **config))
    for request_id, priority in (("zero", 0), ("five", 5), ("minus", -5)):
        h.add(request_id, 5, 2, priority=priority)
    assert run_to_end(h) == [{request_id: n} for request_id in order for n in (5, 1)]


def test_q1_equals_are_served_by_arrival_whatever_clocks_and_names_say() -> None:
    h = Harness(create_lower_first(max_num_seqs=1))
    for i, request_id in enumerate("CAB"):
        h.add(request_id, 5, 1, priority=3, arrival_time=9.0 - i)
    assert run_to_end(h) == [{"C": 5}, {"A": 5}, {"B": 5}]


def test_q6_running_is_sorted_by_urgency_not_by_admission() -> None:
    h = Harness(create_lower_first())
    for request_id, priority in (("c", 3), ("a", 1), ("d", 3), ("b", 2)):
        h.add(request_id, 5, 9, priority=priority)
        h.step()
    assert running_ids(h) == ["a", "b", "c", "d"]
    assert list(h.step()) == ["a", "b", "c", "d"]
    abort_all(h)


def test_q6_the_more_urgent_get_the_tokens_of_a_step_first() -> None:
    h = Harness(create_lower_first(max_num_batched_tokens=10, max_num_seqs=4, max_chunk_size=7))
    h.add("low", 50, 2, priority=5)
    assert h.step() == {"low": 7}
    h.add("high", 20, 2, priority=0)
    assert h.step() == {"low": 7, "high": 3}
    assert h.step() == {"high": 7, "low": 3}
    abort_all(h)


@pytest.mark.parametrize("num_requests", [2, 3])
def test_q6_v4_victims_leave_from_the_end_and_are_not_in_the_step(num_requests: int) -> None:
    h = Harness(create_lower_first(num_blocks=2 * num_requests, block_size=4))
    for i in range(num_requests):
        h.add(f"p{i}", 7, 9, priority=num_requests - i)
    h.step()
    h.step()
    scheduled = h.step()
    assert preempted_in(h) == ["p0"] and "p0" not in scheduled
    assert set(scheduled) == {f"p{i}" for i in range(1, num_requests)}
    run_to_end(h)


def test_q5_a_preempted_request_keeps_its_place() -> None:
    h = Harness(create_lower_first(num_blocks=4, block_size=4))
    h.add("A", 7, 6, priority=1)
    h.add("B", 7, 6, priority=5)
    for _ in range(3):
        h.step()
    assert preempted_in(h) == ["B"]
    h.add("urgent", 8, 1, priority=4)
    h.add("equal", 1, 1, priority=5)
    h.add("late", 1, 1, priority=9)
    assert [h.step() for _ in range(3)] == [{"A": 1}] * 3
    assert h.step() == {"urgent": 8}, "before B; and nobody passes B, which does not fit beside it"
    assert h.step() == {"B": 9, "equal": 1}
    assert h.step() == {"B": 1, "late": 1}
    abort_all(h)


def test_q5_fcfs_puts_a_preempted_request_before_the_younger() -> None:
    h = Harness(create_scheduler(num_blocks=4, block_size=4))
    h.add("A", 7, 6, priority=9)
    h.add("B", 7, 6, priority=0)
    for _ in range(3):
        h.step()
    assert preempted_in(h) == ["B"], "fcfs reads no priority"
    h.add("N", 1, 2, priority=-9)
    assert [h.step() for _ in range(4)] == [{"A": 1}, {"A": 1}, {"A": 1}, {"B": 5, "N": 1}]
    abort_all(h)


# ------------------------------------------------------------------- making way: it happens


@pytest.mark.parametrize(("order", "urgent"), [("lower-first", 0), ("higher-first", 9)])
def test_q7_amendment_8_a_seat_is_given_up_at_once(order: str, urgent: int) -> None:
    h = Harness(create_scheduler(policy="priority", priority_order=order, max_num_seqs=1, block_size=4))
    prompt = list(range(7))
    h.add("L", prompt, 6, priority=5)
    assert [h.step(), h.step()] == [{"L": 7}, {"L": 1}]
    h.add("H", 5, 2, priority=urgent)
    assert h.step() == {"H": 5} and preempted_in(h) == ["L"]
    assert h.step() == {"H": 1} and preempted_in(h) == []
    assert h.step() == {"L": 1}  # the ninth token; the cache kept the other eight
    run_to_end(h)
    assert h.token_ids["L"] == foretell(prompt, 6)


def test_q7_the_victim_is_the_least_urgent_and_of_those_the_youngest() -> None:
    h = Harness(create_lower_first(max_num_seqs=3))
    for request_id, priority in (("old", 7), ("young", 7), ("mid", 3)):
        h.add(request_id, 5, 9, priority=priority)
    h.step()
    h.add("H", 5, 9, priority=1)
    assert h.step() == {"mid": 1, "old": 1, "H": 5} and preempted_in(h) == ["young"]
    abort_all(h)


def test_q7_blocks_are_given_up() -> None:
    h = Harness(create_lower_first(num_blocks=4, block_size=4))
    h.add("L", 10, 9, priority=5)
    h.step()
    h.add("H", 8, 2, priority=0)
    assert h.step() == {"H": 8} and preempted_in(h) == ["L"]
    run_to_end(h)
    assert len(h.token_ids["L"]) == 7, "up to the end of the pool"


def test_q7_one_victim_a_step_until_the_head_fits() -> None:
    h = Harness(create_lower_first(num_blocks=6, block_size=4))
    for i in range(3):
        h.add(f"L{i}", 5, 4, priority=5)
    h.step()
    h.add("H", 16, 1, priority=0)
    assert h.step() == {"L0": 1, "L1": 1} and preempted_in(h) == ["L2"]
    assert h.step() == {"L0": 1, "H": 16} and preempted_in(h) == ["L1"]
    run_to_end(h)


def test_q7_a_seat_and_blocks_in_one() -> None:
    h = Harness(create_lower_first(num_blocks=4, block_size=4, max_num_seqs=2))
    h.add("L1", 7, 2, priority=5)
    h.add("L2", 7, 2, priority=5)
    h.step()
    h.add("H", 7, 2, priority=0)
    assert h.step() == {"L1": 1, "H": 7} and preempted_in(h) == ["L2"]
    abort_all(h)


def test_q7_nobody_is_displaced_again_before_the_head_is_in() -> None:
    h = Harness(create_lower_first(max_num_seqs=2))
    h.add("L1", 5, 9, priority=5)
    h.add("L2", 5, 9, priority=5)
    h.step()
    h.add("H1", 5, 9, priority=0)
    h.add("H2", 5, 9, priority=0)
    assert h.step() == {"L1": 1, "H1": 5} and preempted_in(h) == ["L2"]
    assert h.step() == {"H1": 1, "H2": 5} and preempted_in(h) == ["L1"]
    assert h.step() == {"H1": 1, "H2": 1} and preempted_in(h) == []
    abort_all(h)


# -------------------------------------------------------------- making way: it does not happen


@pytest.mark.parametrize("priority", [5, 6])
@pytest.mark.parametrize("config", [{"max_num_seqs": 1}, {"num_blocks": 2, "block_size": 4}])
def test_q7_only_the_strictly_more_urgent_displace(priority: int, config: dict[str, Any]) -> None:
    h = Harness(create_lower_first(**config))
    h.add("running", 5, 3, priority=5)
    h.step()
    h.add("head", 5, 1, priority=priority)
    assert run_to_end(h) == [{"running": 1}, {"running": 1}, {"head": 5}]


def test_q7_the_tie_break_displaces_nobody() -> None:
    park = Park("older")
    h = Harness(create_lower_first(max_num_seqs=1, constraints=[park]))
    h.add("older", 5, 1, priority=5)
    h.add("running", 5, 3, priority=5)
    assert h.step() == {"running": 5}
    park.request_ids.clear()
    assert run_to_end(h) == [{"running": 1}, {"running": 1}, {"older": 5}]


@pytest.mark.parametrize("config", [{"max_num_seqs": 1}, {"num_blocks": 2, "block_size": 4}])
def test_q7_fcfs_displaces_nobody(config: dict[str, Any]) -> None:
    h = Harness(create_scheduler(**config))
    h.add("running", 5, 3, priority=-9)
    h.step()
    h.add("head", 5, 1, priority=9)
    assert run_to_end(h) == [{"running": 1}, {"running": 1}, {"head": 5}]


def test_q7_nobody_makes_way_for_one_that_fits_anyhow() -> None:
    h = Harness(create_lower_first(num_blocks=4, block_size=4, max_num_seqs=2))
    h.add("L", 7, 2, priority=5)
    h.step()
    h.add("H", 7, 2, priority=0)
    assert h.step() == {"L": 1, "H": 7} and preempted_in(h) == []
    run_to_end(h)


def test_q7_nobody_makes_way_for_one_that_would_not_get_in() -> None:
    h = Harness(create_lower_first(num_blocks=6, block_size=4))
    h.add("urgent", 13, 3, priority=0)
    h.add("L", 5, 3, priority=9)
    h.step()
    h.add("H", 9, 2, priority=5)  # three blocks, and L has but two
    assert h.step() == {"urgent": 1, "L": 1} and preempted_in(h) == []
    run_to_end(h)
    assert h.scheduler.requests == {} and h.last["L"].finish_reason is FinishReason.LENGTH


def test_q7_blocks_that_others_hold_too_are_not_counted() -> None:
    h = Harness(create_lower_first(num_blocks=5, block_size=4))
    stem = list(range(8))
    h.add("urgent", [*stem, 1], 4, priority=0)
    h.add("L", [*stem, 2], 4, priority=9)
    assert h.step() == {"urgent": 9, "L": 1} and h.free == 1
    h.add("H", 9, 1, priority=5)  # lacks two blocks; of L's three only one is its own
    assert h.step() == {"urgent": 1, "L": 1} and preempted_in(h) == []
    abort_all(h)


@pytest.mark.parametrize("verdict", [Verdict.SKIP, Verdict.STOP])
def test_q7_the_other_checks_come_first(verdict: Verdict) -> None:
    park = Park("H")
    h = Harness(create_lower_first(max_num_seqs=1, constraints=[park]))
    park.verdict = verdict
    h.add("L", 5, 9, priority=5)
    h.step()
    h.add("H", 5, 2, priority=0)
    assert [h.step(), h.step()] == [{"L": 1}, {"L": 1}]
    park.request_ids.clear()
    assert h.step() == {"H": 5} and preempted_in(h) == ["L"]
    abort_all(h)


def test_q7_a_whole_prompt_needs_a_whole_step() -> None:
    config: dict[str, Any] = {"max_num_batched_tokens": 20, "enable_chunked_prefill": False}
    h = Harness(create_lower_first(max_num_seqs=2, **config))
    h.add("urgent", 5, 3, priority=0)
    h.add("L", 5, 9, priority=9)
    h.step()
    h.add("H", 20, 2, priority=5)  # one token short, as long as the urgent one runs
    assert [h.step(), h.step()] == [{"urgent": 1, "L": 1}] * 2
    assert h.step() == {"L": 1} and preempted_in(h) == []  # it does not lack a seat now, but tokens (V1)
    abort_all(h)


def test_q7_v1_nobody_makes_way_for_want_of_tokens() -> None:
    h = Harness(create_lower_first(max_num_batched_tokens=4, max_num_seqs=2))
    h.add("L", 4, 9, priority=9)
    assert h.step() == {"L": 4}
    h.add("urgent", 9, 9, priority=0)
    assert h.step() == {"L": 1, "urgent": 3}
    h.add("H", 4, 2, priority=5)  # lacks L's seat, but the urgent one takes all tokens
    assert h.step() == {"urgent": 4} and preempted_in(h) == []
    assert h.step() == {"urgent": 2, "H": 2} and preempted_in(h) == ["L"]
    abort_all(h)


def test_q7_nobody_makes_way_if_the_heads_own_prefix_is_what_he_would_give() -> None:
    h = Harness(create_lower_first(num_blocks=6, block_size=4))
    stem = list(range(8))
    h.add("urgent", 9, 4, priority=0)
    h.add("L", [*stem, 1], 4, priority=9)
    h.step()
    # Two hits in L's blocks, two blocks lacking. Without L, the hits would have to be taken from the free ones too.
    h.add("H", [*stem, *range(50, 58)], 1, priority=5)
    assert h.step() == {"urgent": 1, "L": 1} and preempted_in(h) == []
    abort_all(h)


def test_q7_the_watermark_is_not_kept_for_a_head_that_will_be_alone() -> None:
    h = Harness(create_lower_first(num_blocks=4, block_size=4, watermark=0.5))
    h.add("L", 13, 4, priority=9)
    h.step()
    h.add("H", 9, 1, priority=0)
    assert h.step() == {"H": 9} and preempted_in(h) == ["L"]
    abort_all(h)


@pytest.mark.parametrize("watermark", [0.0, 0.5])
def test_q7_churn_ends_and_everybody_gets_his_tokens(watermark: float) -> None:
    h = Harness(create_lower_first(num_blocks=8, block_size=4, max_num_seqs=3, watermark=watermark))
    prompts = {f"{i}": [*range(i), 9, 9, 9] for i in range(10)}
    num_preempted = 0
    for i, (request_id, prompt) in enumerate(prompts.items()):
        h.add(request_id, prompt, 9, priority=9 - i)
        h.step()
        num_preempted += len(preempted_in(h))
    run_to_end(h)
    assert num_preempted >= 3
    assert h.token_ids == {request_id: foretell(prompt, 9) for request_id, prompt in prompts.items()}
