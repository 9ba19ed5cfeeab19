"""Holding still (S7)."""

from __future__ import annotations

import pytest

from engine_core.messages import FinishReason
from engine_core.scheduler.scheduler import PauseState
from tests.engine_core.scheduler.scenario_helpers import abort_all, create_lower_first, foretell, run_to_end
from tests.engine_core.scheduler.scheduler_helpers import Harness, create_scheduler

both_pauses = pytest.mark.parametrize("state", [PauseState.PAUSED_NEW, PauseState.PAUSED_ALL])


def test_s7_paused_new_lets_the_running_go_on_and_nobody_in() -> None:
    h = Harness(create_scheduler())
    h.add("A", 5, 3)
    h.step()
    h.scheduler.pause(PauseState.PAUSED_NEW)
    h.add("B", 5, 2)
    assert [h.step() for _ in range(3)] == [{"A": 1}, {"A": 1}, {}]
    assert h.last["A"].finish_reason is FinishReason.LENGTH
    h.scheduler.pause(PauseState.UNPAUSED)
    assert h.step() == {"B": 5}
    run_to_end(h)


def test_s7_paused_new_finishes_a_prompt_that_has_begun() -> None:
    h = Harness(create_scheduler(max_num_batched_tokens=8, max_num_seqs=8))
    h.add("A", 20, 1)
    h.step()
    h.scheduler.pause(PauseState.PAUSED_NEW)
    assert run_to_end(h) == [{"A": 8}, {"A": 4}]


def test_s7_paused_new_keeps_preempted_requests_out_too() -> None:
    h = Harness(create_scheduler(num_blocks=4, block_size=4))
    h.add("A", 7, 6)
    h.add("B", 7, 6)
    h.step()
    h.scheduler.pause(PauseState.PAUSED_NEW)
    assert [h.step() for _ in range(6)] == [{"A": 1, "B": 1}, *[{"A": 1}] * 4, {}]
    h.scheduler.pause(PauseState.UNPAUSED)
    assert set(h.step()) == {"B"}
    run_to_end(h)


def test_s7_q7_nobody_makes_way_while_nobody_is_admitted() -> None:
    h = Harness(create_lower_first(max_num_seqs=1))
    h.add("L", 5, 9, priority=5)
    h.step()
    h.scheduler.pause(PauseState.PAUSED_NEW)
    h.add("H", 5, 2, priority=0)
    assert [h.step(), h.step()] == [{"L": 1}, {"L": 1}]
    h.scheduler.pause(PauseState.UNPAUSED)
    assert h.step() == {"H": 5}
    abort_all(h)


def test_s7_paused_all_gives_no_tokens_and_takes_no_blocks() -> None:
    h = Harness(create_scheduler(block_size=4))
    prompt = list(range(6))
    h.add("A", prompt, 9)
    h.step()
    h.scheduler.pause(PauseState.PAUSED_ALL)
    table, free = list(h.table("A")), h.free
    h.add("B", 5, 2)
    assert [h.step() for _ in range(10)] == [{}] * 10
    assert (h.table("A"), h.free) == (table, free)
    assert h.scheduler.make_stats().num_stalls == 0 and h.last == {}, "held, not stuck"
    h.scheduler.pause(PauseState.UNPAUSED)
    assert h.step() == {"A": 1, "B": 5}
    run_to_end(h)
    assert h.token_ids["A"] == foretell(prompt, 9)


@both_pauses
def test_s7_a_waiting_request_is_not_failed_for_standing_alone(state: PauseState) -> None:
    h = Harness(create_scheduler())
    h.scheduler.pause(state)
    h.add("A", 5, 2)
    assert [h.step() for _ in range(5)] == [{}] * 5 and h.last == {}
    h.scheduler.pause(PauseState.UNPAUSED)
    assert run_to_end(h) == [{"A": 5}, {"A": 1}]


@both_pauses
def test_s7_aborts_are_heard_and_told_while_paused(state: PauseState) -> None:
    h = Harness(create_scheduler())
    h.add("A", 5, 9)
    h.step()
    h.add("W", 5, 9)
    h.scheduler.pause(state)
    h.abort("A", "W")
    assert h.free == 64 and h.step() == {}
    assert sorted(h.reported_finished) == ["A", "W"] and not h.runner.rows
    abort_all(h)


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_s7_results_in_flight_come_in_while_paused(depth: int) -> None:
    h = Harness(create_scheduler(max_steps_in_flight=depth))
    prompt = list(range(6))
    h.add("A", prompt, 9)
    for _ in range(depth):
        h.schedule()
    h.scheduler.pause(PauseState.PAUSED_ALL)
    for num_tokens in range(1, depth + 1):
        assert h.step() == {}
        assert len(h.token_ids["A"]) == num_tokens
    h.scheduler.pause(PauseState.UNPAUSED)
    run_to_end(h)
    assert h.token_ids["A"] == foretell(prompt, 9)


def test_s7_k12_a_reset_while_paused_starts_everybody_again() -> None:
    h = Harness(create_scheduler(block_size=4))
    prompt = list(range(6))
    h.add("A", prompt, 5)
    h.step()
    h.scheduler.pause(PauseState.PAUSED_ALL)
    assert h.scheduler.reset_prefix_cache(reset_running=True)
    assert h.step() == {} and h.free == 64
    h.scheduler.pause(PauseState.UNPAUSED)
    assert h.step() == {"A": 7}
    run_to_end(h)
    assert h.token_ids["A"] == foretell(prompt, 5)
