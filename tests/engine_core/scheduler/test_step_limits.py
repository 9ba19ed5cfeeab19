"""Live caps: lowering drains, raising is immediate, and nothing else changes for anybody."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from engine_core.config import SchedulerConfig
from engine_core.messages import SetLimits
from engine_core.scheduler.step_limits import StepLimits
from tests.engine_core.scheduler.event_player import Player, random_load
from tests.engine_core.scheduler.scenario_helpers import create_lower_first, run_to_end
from tests.engine_core.scheduler.scheduler_helpers import Harness, create_scheduler, is_sentence

CONFIG = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=100)


@pytest.mark.parametrize("num_steps_ahead", [1, 2])
def test_lowering_max_num_seqs_lets_the_running_finish_and_nobody_in_meanwhile(num_steps_ahead: int) -> None:
    h = Harness(create_scheduler(max_num_seqs=4, max_steps_in_flight=num_steps_ahead))
    for number, name in enumerate("ABC"):
        h.add(name, 5, 3 + 2 * number)
    h.step()
    h.scheduler.set_limits(SetLimits(max_num_seqs=1))
    h.add("D", 5, 2)
    counts = [step for step in h.drain() if step]
    assert all("D" not in step for step in counts if {"A", "B", "C"} & set(step))
    assert sum(step.get("D", 0) for step in counts) == 6
    assert h.scheduler.make_stats().num_preempted == 0


def test_raising_it_lets_them_in_at_the_next_step() -> None:
    h = Harness(create_scheduler(max_num_seqs=4))
    h.scheduler.set_limits(SetLimits(max_num_seqs=1))
    for name in "ABC":
        h.add(name, 5, 9)
    assert h.step() == {"A": 5}
    h.scheduler.set_limits(SetLimits(max_num_seqs=3))
    assert h.step() == {"A": 1, "B": 5, "C": 5}
    run_to_end(h)


def test_max_num_batched_tokens_holds_from_the_next_step_on() -> None:
    h = Harness(create_scheduler(max_num_batched_tokens=100, max_num_seqs=4))
    h.add("A", 150, 1)
    assert h.step() == {"A": 100}
    h.scheduler.set_limits(SetLimits(max_num_batched_tokens=20))
    assert h.step() == {"A": 20}
    h.scheduler.set_limits(SetLimits(max_num_batched_tokens=100))
    assert h.step() == {"A": 30}
    run_to_end(h)


def test_nobody_makes_way_for_the_more_urgent_while_more_run_than_may() -> None:
    h = Harness(create_lower_first(max_num_seqs=2))
    h.add("L1", 5, 6, priority=5)
    h.add("L2", 5, 3, priority=5)
    h.step()
    h.scheduler.set_limits(SetLimits(max_num_seqs=1))
    h.add("H", 5, 2, priority=0)
    assert [h.step() for _ in range(2)] == [{"L1": 1, "L2": 1}] * 2
    assert h.step() == {"H": 5}, "with one left, it makes way as ever"
    run_to_end(h)


@pytest.mark.parametrize(
    "wanted",
    [
        SetLimits(max_num_seqs=9),
        SetLimits(max_num_seqs=0),
        SetLimits(max_num_batched_tokens=101),
        SetLimits(max_num_batched_tokens=0),
        SetLimits(max_num_batched_tokens=7),
        SetLimits(max_num_seqs=4, max_num_batched_tokens=101),
    ],
)
def test_what_does_not_fit_is_refused_whole_and_in_a_sentence(wanted: SetLimits) -> None:
    limits = StepLimits(CONFIG)
    with pytest.raises(ValueError) as caught:
        limits.set(wanted)
    assert is_sentence(str(caught.value).strip("`").capitalize())
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (8, 100)


def test_both_may_go_down_together_and_up_again_to_what_was_allocated() -> None:
    limits = StepLimits(CONFIG)
    limits.set(SetLimits(max_num_seqs=2, max_num_batched_tokens=7))
    assert (limits.max_num_seqs, limits.max_num_batched_tokens, limits.allocated_num_seqs) == (2, 7, 8)
    limits.set(SetLimits())
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (2, 7)
    limits.set(SetLimits(max_num_seqs=8, max_num_batched_tokens=100))
    assert (limits.max_num_seqs, limits.max_num_batched_tokens) == (8, 100)


def test_a_prompt_that_is_computed_whole_keeps_a_step_that_holds_it() -> None:
    scheduler = create_scheduler(max_model_len=50, max_num_batched_tokens=80, enable_chunked_prefill=False)
    with pytest.raises(ValueError, match="may be 50 to 80"):
        scheduler.set_limits(SetLimits(max_num_batched_tokens=49))
    scheduler.set_limits(SetLimits(max_num_batched_tokens=50, max_num_seqs=3))
    assert (scheduler.max_num_batched_tokens, scheduler.max_num_seqs) == (50, 3)


def test_whatever_is_changed_when_each_request_gets_its_own_tokens() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        rng = random.Random(seed)
        config, events = random_load(rng)
        player = Player(config)
        for event in events:
            if rng.random() < 0.2:
                least = config["max_num_seqs"] if config["enable_chunked_prefill"] else config["max_model_len"]
                wanted = SetLimits(
                    rng.randint(1, config["max_num_seqs"]),
                    rng.randint(min(least, config["max_num_batched_tokens"]), config["max_num_batched_tokens"]),
                )
                player.scheduler.set_limits(wanted)
                seen["above"] += len(player.scheduler.running) > player.scheduler.max_num_seqs
            player.play_one(event)
        player.drain()
        player.check_results()
        player.check_nothing_leaked()
    assert seen["above"] > 20, seen
