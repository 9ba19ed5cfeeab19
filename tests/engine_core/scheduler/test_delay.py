"""The delay factor (B7): who is held back, for how long, and who never is.

In the harness a step takes a tenth of a second a token: a prompt of ten tokens takes one second, alone.
"""

from __future__ import annotations

from typing import Any

from engine_core.config import SchedulerConfig
from engine_core.scheduler.constraints import build_constraints
from engine_core.scheduler.constraints.delay import DelayFactor
from tests.engine_core.scheduler.scenario_helpers import Park, abort_all, create_lower_first, run_to_end
from tests.engine_core.scheduler.scheduler_helpers import Harness, create_scheduler


def create_delaying(**overrides: Any) -> Harness:
    """Return a harness in which a new request waits twice the last prompt step's time."""
    return Harness(create_scheduler(**{"delay_factor": 2.0, **overrides}))


def test_b7_off_by_default() -> None:
    assert build_constraints(SchedulerConfig(), block_size=16) == []
    (constraint,) = build_constraints(SchedulerConfig(delay_factor=0.5), block_size=16)
    assert isinstance(constraint, DelayFactor)


def test_b7_off_no_clock_is_read() -> None:
    h = create_delaying(delay_factor=0.0)
    h.add("A", 10, 9)
    h.step()
    h.add("B", 10, 9)
    assert h.step() == {"A": 1, "B": 10}
    abort_all(h)


def test_b7_a_new_request_waits_its_time_out() -> None:
    h = create_delaying()
    h.add("A", 10, 20)
    h.step()
    h.add("B", 10, 9, arrival_time=10.0)
    for h.now in (10.0, 11.0, 12.0):  # the end itself still counts as waiting
        assert h.step() == {"A": 1}
    h.now = 12.25
    assert h.step() == {"A": 1, "B": 10}
    abort_all(h)


def test_b7_nothing_running_means_no_wait() -> None:
    h = create_delaying()
    h.add("A", 10, 2)
    run_to_end(h)
    h.add("B", 10, 2)
    h.add("C", 10, 2)
    assert h.step() == {"B": 10, "C": 10}, "all that come to an idle engine start together"
    run_to_end(h)


def test_b7_the_head_opens_the_step_for_those_behind_it() -> None:
    h = create_delaying()
    h.add("A", 10, 20)
    h.step()
    h.add("B", 10, 9, arrival_time=10.0)
    h.add("C", 10, 9, arrival_time=12.5)
    h.now = 12.5
    assert h.step() == {"A": 1, "B": 10, "C": 10}
    abort_all(h)


def test_b7_q3_a_held_head_holds_those_behind_it() -> None:
    h = create_delaying()
    h.add("A", 10, 20)
    h.step()
    h.add("B", 10, 9, arrival_time=10.0)
    h.add("C", 10, 9, arrival_time=0.0)
    h.now = 11.0
    assert h.step() == {"A": 1}
    abort_all(h)


def test_b7_only_steps_with_prompts_are_measured() -> None:
    h = create_delaying()
    h.add("A", 10, 20)
    h.step()
    for _ in range(3):
        h.step()  # decodes take a tenth of a second, and move nothing
    h.add("B", 9, 9, arrival_time=10.0)
    h.now = 11.75
    assert h.step() == {"A": 1}
    h.now = 12.25
    assert h.step() == {"A": 1, "B": 9}
    h.add("C", 39, 9, arrival_time=20.0)
    h.now = 22.25
    assert h.step() == {"A": 1, "B": 1, "C": 39}
    h.add("D", 5, 9, arrival_time=30.0)
    for h.now in (32.25, 38.0):  # C's step took 4.1 seconds
        assert h.step() == {"A": 1, "B": 1, "C": 1}
    h.now = 38.25
    assert h.step() == {"A": 1, "B": 1, "C": 1, "D": 5}
    abort_all(h)


def test_b7_a_preempted_request_is_never_held_back() -> None:
    h = create_delaying(num_blocks=7, block_size=4, enable_prefix_caching=False, delay_factor=1000.0)
    for request_id in "AMB":
        h.add(request_id, 7, 9)
    for _ in range(3):
        h.step()
    assert h.output is not None and h.output.preempted_req_ids == ["B"]
    h.abort("M")
    h.add("new", 1, 2)
    assert h.step() == {"A": 1, "B": 9}
    assert h.step() == {"A": 1, "B": 1} and h.free > 0, "the new one waits, although it would fit"
    abort_all(h)


def test_b7_s1_running_requests_are_not_touched() -> None:
    h = create_delaying(max_num_batched_tokens=8, max_num_seqs=8)
    h.add("A", 20, 2)
    assert run_to_end(h) == [{"A": 8}, {"A": 8}, {"A": 4}, {"A": 1}]


def test_b7_q7_nobody_makes_way_for_one_that_must_wait() -> None:
    h = Harness(create_lower_first(delay_factor=2.0, max_num_seqs=1))
    h.add("L", 10, 20, priority=5)
    h.step()
    h.add("H", 10, 2, priority=0, arrival_time=10.0)
    h.now = 11.0
    assert h.step() == {"L": 1}
    h.now = 12.5
    assert h.step() == {"H": 10}
    abort_all(h)


def test_b7_q4_a_parked_head_does_not_open_the_step() -> None:
    park = Park("old")
    h = create_delaying(constraints=[park, DelayFactor(2.0)])
    h.add("A", 10, 20)
    h.step()
    h.add("old", 5, 9, arrival_time=0.0)
    h.add("new", 5, 9, arrival_time=10.0)
    h.now = 11.0
    assert h.step() == {"A": 1}
    h.now = 12.5
    assert h.step() == {"A": 1, "new": 5}
    park.request_ids.clear()
    assert h.step() == {"A": 1, "new": 1, "old": 5}
    abort_all(h)
