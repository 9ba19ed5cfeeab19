"""Constraints as a seam: each hook is called where it should be, and no verdict can hang the scheduler."""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.messages import FinishReason
from engine_core.request import Request
from engine_core.scheduler.constraint import Constraint, Verdict
from engine_core.scheduler.output import SchedulerOutput
from engine_core.scheduler.step_plan import StepPlan
from tests.engine_core.scheduler.scheduler_helpers import Harness, create_scheduler


class Gate(Constraint):
    """Gives fixed verdicts by request id."""

    def __init__(self, **verdicts: Verdict) -> None:
        self.verdicts = verdicts

    def gate(self, request: Request, plan: StepPlan) -> Verdict:
        return self.verdicts.get(request.request_id, Verdict.ADMIT)


class Recorder(Constraint):
    """Writes down every call."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def begin_step(self, plan: StepPlan, running: Sequence[Request]) -> None:
        self.calls.append(("begin_step", plan.now, len(running)))

    def commit(self, request: Request, num_computed_tokens: int, num_new_tokens: int, plan: StepPlan) -> None:
        self.calls.append(("commit", request.request_id, num_computed_tokens, num_new_tokens))

    def release(self, request: Request) -> None:
        self.calls.append(("release", request.request_id))

    def annotate(self, output: SchedulerOutput, plan: StepPlan) -> None:
        self.calls.append(("annotate", output.total_num_scheduled_tokens))


class HoldAfter(Constraint):
    """Gives a request nothing once it has so many computed tokens."""

    def __init__(self, num_tokens: int) -> None:
        self.num_tokens = num_tokens

    def cap(self, request: Request, num_computed_tokens: int, num_new_tokens: int, plan: StepPlan) -> int:
        return num_new_tokens if num_computed_tokens < self.num_tokens else 0


def test_no_op_defaults_change_nothing() -> None:
    traces = []
    for constraints in ([], [Constraint()]):
        h = Harness(create_scheduler(max_num_batched_tokens=8, max_num_seqs=4, constraints=constraints))
        h.add("A", list(range(20)), 3)
        h.add("B", list(range(9)), 3)
        traces.append(h.drain())
    assert traces[0] == traces[1]


def test_hooks_are_called_in_order() -> None:
    recorder = Recorder()
    h = Harness(create_scheduler(max_num_batched_tokens=64, constraints=[recorder]))
    h.add("A", 80, 1)
    h.drain()
    assert recorder.calls == [
        ("begin_step", 0.0, 0),
        ("commit", "A", 0, 64),
        ("annotate", 64),
        ("begin_step", 0.0, 1),
        ("commit", "A", 64, 16),
        ("annotate", 16),
        ("release", "A"),
        ("begin_step", 0.0, 0),  # the round that tells the runner that A is gone
        ("annotate", 0),
    ]


def test_release_is_called_on_preemption_and_on_abort() -> None:
    recorder = Recorder()
    h = Harness(create_scheduler(num_blocks=4, block_size=4, constraints=[recorder]))
    h.add("A", 7, 6)
    h.add("B", 7, 6)
    for _ in range(3):
        h.step()
    assert ("release", "B") in recorder.calls
    h.abort("A", "B")
    assert [call for call in recorder.calls if call[0] == "release"] == [
        ("release", "B"),
        ("release", "A"),
        ("release", "B"),
    ]


def test_q4_skip_lets_younger_ones_pass_and_keeps_the_place() -> None:
    gate = Gate(A=Verdict.SKIP)
    h = Harness(create_scheduler(constraints=[gate]))
    h.add("A", 10, 2)
    h.add("B", 10, 4)
    h.add("C", 10, 4)
    assert h.step() == {"B": 10, "C": 10}
    gate.verdicts.clear()
    assert h.step() == {"B": 1, "C": 1, "A": 10}
    # Sorted by rank: A, the oldest, is now served first and preempted last.
    assert h.step() == {"A": 1, "B": 1, "C": 1}


def test_a_skipped_request_may_wait_alone() -> None:
    gate = Gate(A=Verdict.SKIP)
    h = Harness(create_scheduler(constraints=[gate]))
    h.add("A", 10, 2)
    assert [h.step() for _ in range(5)] == [{}] * 5
    gate.verdicts.clear()
    assert h.drain() == [{"A": 10}, {"A": 1}]


def test_stop_holds_back_everything_behind() -> None:
    gate = Gate(B=Verdict.STOP)
    h = Harness(create_scheduler(constraints=[gate]))
    h.add("A", 10, 4)
    h.add("B", 10, 2)
    h.add("C", 10, 2)
    assert [h.step() for _ in range(2)] == [{"A": 10}, {"A": 1}]
    gate.verdicts.clear()
    assert h.step() == {"A": 1, "B": 10, "C": 10}


def test_n3_a_head_that_cannot_be_admitted_with_nothing_running_ends_with_an_error() -> None:
    h = Harness(create_scheduler(constraints=[Gate(A=Verdict.STOP)]))
    h.add("A", 10, 2)
    h.add("B", 10, 2)
    assert h.drain() == [{"B": 10}, {"B": 1}]
    assert h.last["A"].finish_reason is FinishReason.ERROR
    assert h.last["A"].error is not None and "cannot be scheduled" in h.last["A"].error
    assert h.last["B"].finish_reason is FinishReason.LENGTH


def test_n3_the_last_request_failing_is_still_told() -> None:
    h = Harness(create_scheduler(constraints=[HoldAfter(0)]))
    h.add("A", 10, 2)
    assert h.drain() == []
    assert h.last["A"].finish_reason is FinishReason.ERROR


def test_n3_a_head_is_not_given_up_while_a_step_in_flight_may_change_its_luck() -> None:
    gate = Gate(B=Verdict.STOP)
    h = Harness(create_scheduler(constraints=[gate], max_steps_in_flight=2))
    h.add("A", 10, 4)
    h.step()
    h.add("B", 10, 2)
    h.abort("A")
    assert h.schedule() == {} and h.scheduler.num_steps_in_flight == 1
    assert "B" in h.scheduler.requests
    gate.verdicts.clear()
    assert h.schedule() == {"B": 10}
    while h.in_flight:
        h.update()
    h.drain()
    assert h.last["B"].finish_reason is FinishReason.LENGTH


def test_n6_one_step_without_work_ends_nobody() -> None:
    hold = HoldAfter(10)
    h = Harness(create_scheduler(constraints=[hold]))
    h.add("A", 10, 3)
    assert [h.step(), h.step()] == [{"A": 10}, {}]
    assert h.scheduler.make_stats().num_stalls == 1
    hold.num_tokens = 100
    assert h.drain() == [{"A": 1}, {"A": 1}]
    assert h.last["A"].finish_reason is FinishReason.LENGTH


def test_n6_n8_a_running_request_held_back_for_ever_ends_with_an_error() -> None:
    h = Harness(create_scheduler(max_num_batched_tokens=64, constraints=[HoldAfter(64)]))
    h.add("A", 100, 2)
    h.add("B", 10, 3)
    assert h.drain(max_steps=12)[0] == {"A": 64}
    assert h.last["A"].finish_reason is FinishReason.ERROR
    assert h.last["B"].finish_reason is FinishReason.LENGTH


def test_a_capped_running_request_does_not_hold_up_others() -> None:
    h = Harness(create_scheduler(max_num_batched_tokens=64, constraints=[HoldAfter(64)]))
    h.add("A", 100, 2)
    h.step()
    h.add("B", 10, 3)
    assert h.step() == {"B": 10}
    assert h.step() == {"B": 1}


def test_a_constraint_knows_which_hooks_it_has() -> None:
    hooks = ["gate", "cap", "commit", "begin_step", "annotate", "end_step", "release"]
    assert [hook for hook in hooks if HoldAfter(1).overrides(hook)] == ["cap"]
    assert not any(Constraint().overrides(hook) for hook in hooks)
