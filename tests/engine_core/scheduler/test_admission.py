"""What admission must leave alone: steps that preempted, requests that made way, queues of heads that do not fit."""

from __future__ import annotations

from tests.engine_core.scheduler.scenario_helpers import (
    Park,
    create_lower_first,
    foretell,
    other_than,
    preempted_in,
    run_to_end,
)
from tests.engine_core.scheduler.scheduler_helpers import Harness, create_scheduler


def test_s1_nobody_is_admitted_in_a_step_that_preempted_even_if_the_victim_is_parked() -> None:
    h = Harness(create_scheduler(num_blocks=4, block_size=4, max_steps_in_flight=2))
    h.add("A", 7, 6)
    h.add("B", 7, 6)
    h.step()
    h.step()
    h.add("N", 1, 1)  # the head of the queue: B is not in it while its output is under way
    assert h.schedule() == {"A": 1} and preempted_in(h) == ["B"]
    assert h.free == 1 and list(h.scheduler.parked) == ["B"]
    run_to_end(h)


def test_s1_nobody_is_admitted_in_a_step_that_preempted_even_if_the_victim_is_passed_by() -> None:
    park = Park()
    h = Harness(create_scheduler(num_blocks=4, block_size=4, constraints=[park]))
    h.add("A", 7, 6)
    h.add("B", 7, 6)
    h.step()
    h.step()
    h.add("N", 1, 1)
    park.request_ids = {"B"}
    assert h.step() == {"A": 1} and preempted_in(h) == ["B"]
    assert h.step() == {"A": 1, "N": 1}
    park.request_ids.clear()
    run_to_end(h)


def test_a9_a_refused_head_does_not_make_its_hits_younger() -> None:
    h = Harness(create_scheduler(num_blocks=7))
    stem = list(range(32))
    for request_id, prompt in (("old", stem), ("young", list(range(50, 66)))):
        h.add(request_id, prompt)
        h.drain()
    h.add("A", 60, 9)
    h.step()
    assert h.free_order == [2, 1, 3]
    h.add("B", [*stem, *range(70, 102)], 2)
    assert h.step() == {"A": 1}
    assert h.free_order == [2, 1, 3], "a lookup is no use"
    run_to_end(h)


def test_q7_nobody_makes_way_whose_blocks_are_all_the_heads_own_prefix() -> None:
    h = Harness(create_lower_first(num_blocks=6, block_size=4))
    stem = list(range(8))
    h.add("A", 9, 4, priority=8)
    h.add("V", stem, 4, priority=9)
    h.step()
    # A's blocks would do, but V stands behind A, and would give nothing that H does not find anyway.
    h.add("H", [*stem, *range(50, 58)], 1, priority=5)
    assert h.step() == {"A": 1, "V": 1} and preempted_in(h) == []
    # Now V holds a block of its own.
    h.step()
    assert preempted_in(h) == ["V"]
    run_to_end(h)


def test_v8_who_made_way_does_not_come_back_in_the_same_step() -> None:
    h = Harness(create_lower_first(num_blocks=3, block_size=4))
    prompt = list(range(4))
    h.add("L", prompt, 8, priority=9)
    h.step()
    wrong = other_than(foretell(prompt, 2)[1])
    h.scheduler.set_draft_token_ids({"L": [wrong] * 4})
    assert h.step() == {"L": 5}
    assert len(h.table("L")) == 3, "rejected drafts leave their blocks: it has more than it would need again"
    h.add("H", 4, 1, priority=0)
    assert h.step() == {"H": 4} and preempted_in(h) == ["L"]
    assert h.free == 3
    run_to_end(h)
