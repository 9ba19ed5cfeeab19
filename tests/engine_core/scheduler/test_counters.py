"""The running sums between two SchedulerStats, one event at a time."""

from __future__ import annotations

from dataclasses import fields

import pytest

from engine_core.scheduler.counters import StepCounters
from engine_core.stats import SchedulerStats


def show(counters: StepCounters) -> dict[str, int | list[int]]:
    """Return what is not zero."""
    values = {name: getattr(counters, name) for name in StepCounters.__slots__}
    return {name: value for name, value in values.items() if value}


def test_they_start_from_zero_and_do_so_again() -> None:
    counters = StepCounters()
    assert show(counters) == {}
    for name in StepCounters.__slots__:
        setattr(counters, name, [1] if name == "num_accepted_tokens" else 7)
    assert len(show(counters)) == len(StepCounters.__slots__)
    counters.clear()
    assert show(counters) == {}


def test_figures_that_were_given_out_do_not_change_afterwards() -> None:
    counters = StepCounters()
    counters.count_accepted(2)
    given_out = counters.num_accepted_tokens
    counters.clear()
    counters.count_accepted(1)
    assert (given_out, counters.num_accepted_tokens) == ([1, 1], [1])


def test_each_is_a_figure_of_the_stats() -> None:
    assert set(StepCounters.__slots__) <= {field.name for field in fields(SchedulerStats)}


@pytest.mark.parametrize(("is_resumed", "kind"), [(False, "prefix"), (True, "resumed")])
def test_a_lookup_counts_as_what_it_was(is_resumed: bool, kind: str) -> None:
    counters = StepCounters()
    counters.count_lookup(40, 32, is_resumed=is_resumed)
    counters.count_lookup(10, 0, is_resumed=is_resumed)
    assert show(counters) == {f"num_{kind}_queries": 50, f"num_{kind}_hits": 32}


def test_a_step_counts_once_whatever_it_brought() -> None:
    counters = StepCounters()
    counters.count_step(5, 2)
    counters.count_step(0, 3)
    counters.count_step(0, 0)
    assert show(counters) == {
        "num_steps": 3,
        "num_step_prompt_tokens": 5,
        "num_step_generation_tokens": 5,
        "num_generation_tokens": 5,
    }


def test_accepted_drafts_are_counted_by_position() -> None:
    counters = StepCounters()
    for num_accepted in (2, 0, 3, 1):
        counters.count_accepted(num_accepted)
    assert show(counters) == {"num_accepted_tokens": [3, 2, 1]}
