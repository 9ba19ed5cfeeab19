"""Why a request gets no tokens, each reason brought about for real."""

from __future__ import annotations

from engine_core.request import Request
from engine_core.scheduler.constraint import Constraint, Verdict
from engine_core.scheduler.explain import explain_parked, explain_running, explain_waiting
from engine_core.scheduler.scheduler import PauseState, Scheduler
from engine_core.scheduler.step_plan import StepPlan
from tests.engine_core.scheduler.scenario_helpers import Park, SitOut, abort_all, create_lower_first
from tests.engine_core.scheduler.scheduler_helpers import Harness, create_scheduler


def explain(scheduler: Scheduler) -> dict[str, str]:
    """The reason of each waiting request."""
    waiting = scheduler.waiting.get_first(100)
    return dict(zip([request.request_id for request in waiting], explain_waiting(scheduler, waiting), strict=True))


def explain_left_out(scheduler: Scheduler) -> dict[str, str]:
    """The reason of each running request that got no tokens."""
    reasons = zip(scheduler.running, explain_running(scheduler), strict=True)
    return {request.request_id: reason for request, reason in reasons if reason}


def test_all_seats_are_taken_and_the_second_waits_for_the_first() -> None:
    h = Harness(create_scheduler(max_num_seqs=1))
    for name in "ABC":
        h.add(name, 10, 5)
    h.step()
    assert explain(h.scheduler) == {
        "B": "max_num_seqs: 1 of 1 are running",
        "C": "behind request B",
    }
    assert explain_left_out(h.scheduler) == {}
    abort_all(h)


def test_too_few_blocks_are_free() -> None:
    h = Harness(create_scheduler(num_blocks=4))
    h.add("A", 30, 20)
    h.step()
    h.add("B", 40, 5)
    h.step()
    assert explain(h.scheduler) == {"B": "KV blocks: needs 3, 2 free"}
    abort_all(h)


def test_blocks_that_a_cached_prefix_saves_are_not_asked_for() -> None:
    h = Harness(create_scheduler(num_blocks=6))
    prompt = list(range(40))
    h.add("A", [*prompt, 1000], 40)
    h.step()
    h.add("B", 30, 5)
    h.step()
    h.add("C", [*prompt, 2000, *range(3000, 3020)], 5)
    h.step()
    assert explain(h.scheduler) == {"C": "KV blocks: needs 2, 1 free"}, "four blocks, less two that it shares"
    abort_all(h)


def test_what_is_kept_for_others_is_named() -> None:
    h = Harness(create_scheduler(num_blocks=8, max_chunk_size=16))
    h.add("A", 100, 5)  # 7 blocks in the end, 2 after two steps
    h.step()
    h.add("B", 30, 5)
    h.step()
    assert explain(h.scheduler) == {"B": "KV blocks: needs 2 beside 5 kept for running requests, 6 free"}
    abort_all(h)


def test_the_token_budget_is_used_up() -> None:
    h = Harness(create_scheduler(max_num_batched_tokens=8, max_num_seqs=8))
    h.add("A", 8, 20)
    h.step()
    h.add("B", 20, 5)
    h.step()
    h.add("C", 5, 5)
    assert h.step() == {"A": 1, "B": 7}
    assert explain(h.scheduler) == {"C": "token budget: others take all 8 of a step"}
    assert explain_left_out(h.scheduler) == {}
    abort_all(h)


def test_a_more_urgent_prompt_may_leave_a_running_request_without_tokens() -> None:
    h = Harness(create_lower_first(max_num_batched_tokens=8))
    h.add("B", 20, 5, priority=5)
    h.step()
    h.step()
    h.add("A", 20, 5, priority=1)
    assert [h.step(), h.step()] == [{"B": 4, "A": 4}, {"A": 8}]
    assert explain_left_out(h.scheduler) == {"B": "token budget: others take all 8 of a step"}
    abort_all(h)


def test_a_constraint_that_stops_is_named_and_those_behind_wait_for_its_request() -> None:
    h = Harness(create_scheduler(constraints=[Park("B", verdict=Verdict.STOP)]))
    for name in "ABC":
        h.add(name, 10, 5)
    h.step()
    assert explain(h.scheduler) == {"B": "held back by Park", "C": "behind request B"}
    abort_all(h)


def test_who_is_passed_by_holds_up_nobody() -> None:
    h = Harness(create_scheduler(constraints=[Park("A", "C")], max_num_seqs=2))
    for name in "ABCDEF":
        h.add(name, 10, 5)
    h.step()
    assert [request.request_id for request in h.scheduler.running] == ["B", "D"]
    full = "max_num_seqs: 2 of 2 are running"
    assert explain(h.scheduler) == {"A": full, "C": full, "E": full, "F": "behind request E"}
    abort_all(h)


def test_who_is_passed_by_learns_by_what() -> None:
    h = Harness(create_scheduler(constraints=[Park("A", "C")]))
    for name in "ABC":
        h.add(name, 10, 5)
    h.step()
    assert explain(h.scheduler) == {"A": "held back by Park", "C": "held back by Park"}
    abort_all(h)


def test_a_cap_of_nothing_is_named() -> None:
    sit_out = SitOut()
    h = Harness(create_scheduler(constraints=[sit_out]))
    h.add("A", 10, 5)
    h.step()
    h.add("B", 10, 5)
    sit_out.request_ids = {"A", "B"}
    h.step()
    assert explain_left_out(h.scheduler) == {"A": "held back by SitOut"}
    assert explain(h.scheduler) == {"B": "held back by SitOut"}
    abort_all(h)


def test_constraints_are_not_asked_again() -> None:
    class Counting(Constraint):
        num_asked = 0

        def gate(self, request: Request, plan: StepPlan) -> Verdict:
            self.num_asked += 1
            return Verdict.STOP if plan.now < 5 and request.request_id == "B" else Verdict.ADMIT

    counting = Counting()
    h = Harness(create_scheduler(constraints=[counting]))
    h.add("A", 10, 5)
    h.add("B", 10, 5)
    h.step()
    num_asked = counting.num_asked
    assert explain(h.scheduler) == explain(h.scheduler) == {"B": "held back by Counting"}
    assert counting.num_asked == num_asked
    abort_all(h)


def test_a_pause_comes_before_all_else() -> None:
    h = Harness(create_scheduler(max_num_seqs=1))
    h.add("A", 10, 5)
    h.step()
    h.add("B", 10, 5)
    h.scheduler.pause(PauseState.PAUSED_NEW)
    h.step()
    assert explain(h.scheduler) == {"B": "admission is paused"}
    h.scheduler.pause(PauseState.PAUSED_ALL)
    assert explain_left_out(h.scheduler) == {"A": "everything is paused"}
    h.scheduler.pause(PauseState.UNPAUSED)
    abort_all(h)


def test_who_has_just_come_is_next() -> None:
    h = Harness(create_scheduler())
    h.add("A", 10, 5)
    assert explain(h.scheduler) == {"A": "next in line: the next step looks at it"}
    abort_all(h)


def test_a_preempted_request_says_so_beside_what_it_waits_for() -> None:
    h = Harness(create_scheduler(num_blocks=4))
    h.add("A", 30, 30)
    h.add("B", 30, 30)
    h.step()
    while not h.scheduler.waiting:
        h.step()
    (reason,) = explain(h.scheduler).values()
    assert reason.startswith("preempted; KV blocks: needs 3, ")
    abort_all(h)


def test_a_parked_request_waits_for_its_last_token() -> None:
    h = Harness(create_scheduler(num_blocks=4, max_steps_in_flight=2))
    h.add("A", 30, 30)
    h.add("B", 30, 30)
    h.schedule()
    while not h.scheduler.parked:
        if len(h.in_flight) == 2:
            h.update()
        h.schedule()
    assert explain_parked(h.scheduler) == ["preempted; its last token is still being sampled"]
    abort_all(h)


def test_a_more_urgent_one_comes_first_in_words_too() -> None:
    h = Harness(create_lower_first(max_num_seqs=1))
    h.add("A", 10, 5, priority=0)
    h.step()
    h.add("B", 10, 5, priority=9)
    h.add("C", 10, 5, priority=3)
    h.step()
    assert explain(h.scheduler) == {"C": "max_num_seqs: 1 of 1 are running", "B": "behind request C"}
    abort_all(h)


def test_looking_moves_nothing_and_changes_no_decision() -> None:
    def run(*, is_watched: bool) -> list[dict[str, int]]:
        h = Harness(create_scheduler(num_blocks=8, max_num_seqs=3, max_num_batched_tokens=32))
        for i in range(8):
            h.add(f"R{i}", range(1000 * (i % 3), 1000 * (i % 3) + 20 + i), 12)
        steps = []
        while h.has_work:
            if is_watched:
                explain(h.scheduler), explain_running(h.scheduler)
                h.scheduler.check_invariants()
            steps.append(h.step())
        return steps

    assert run(is_watched=True) == run(is_watched=False)
