from __future__ import annotations

from engine_core import SchedulerStats
from server.records import StepRecord
from server.status.history import MAX_SECONDS, MAX_STEPS, Durations, StatusHistory, StepFigures
from tests.server.metric_samples import create_record


class FakeClock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def create_history() -> tuple[StatusHistory, FakeClock]:
    clock = FakeClock()
    return StatusHistory(clock), clock


def step(num_prompt: int = 0, num_generated: int = 1, seconds: float = 0.1, **more: int) -> SchedulerStats:
    return SchedulerStats(
        num_steps=1,
        num_step_prompt_tokens=num_prompt,
        num_step_generation_tokens=num_generated,
        step_time_s=seconds,
        **more,
    )


def test_steps_are_kept_in_order_and_only_the_last_of_them() -> None:
    history, _ = create_history()
    for number in range(MAX_STEPS + 3):
        history.record_step(StepRecord(), step(number, 2, 0.5))
    steps = history.list_steps()
    assert len(steps) == MAX_STEPS
    assert steps[0] == StepFigures(3, 2, 0.5) and steps[-1].num_prompt_tokens == MAX_STEPS + 2


def test_news_without_a_step_are_no_step() -> None:
    history, _ = create_history()
    history.record_step(StepRecord(), None)
    history.record_step(StepRecord(), SchedulerStats(num_waiting=1))
    assert history.list_steps() == []


def test_a_second_adds_up_what_came_in_it_and_shows_once_it_is_over() -> None:
    history, clock = create_history()
    record = StepRecord(num_generation_tokens=3, started=[create_record()], token_gap_s=[0.25, 0.75])
    history.record_step(record, step(num_prompt=8, num_prefix_queries=10, num_prefix_hits=4))
    clock.now += 0.9
    history.record_step(StepRecord(num_generation_tokens=1, token_gap_s=[0.5]), step(num_prompt=2))
    assert history.list_seconds()[-1].num_generation_tokens == 0, "the present second is not over"
    clock.now += 0.1
    figures = history.list_seconds()[-1]
    assert (figures.second, figures.num_prompt_tokens, figures.num_generation_tokens) == (1000, 10, 4)
    assert (figures.num_prefix_queries, figures.num_prefix_hits) == (10, 4)
    assert figures.token_gap == Durations(3, 1.5, 0.75)
    assert figures.first_token == Durations(1, 1.5, 1.5)


def test_there_is_a_row_for_each_second_also_for_those_in_which_nothing_came() -> None:
    history, clock = create_history()
    history.record_step(StepRecord(num_generation_tokens=1), step(num_running=3, num_waiting=2, num_blocks=10))
    clock.now += 5
    history.record_step(StepRecord(num_generation_tokens=1), step(num_running=1, num_blocks=10, num_free_blocks=10))
    clock.now += 2
    seconds = history.list_seconds()
    assert [each.second for each in seconds] == list(range(1007 - MAX_SECONDS, 1007))
    assert [each.num_generation_tokens for each in seconds[-8:]] == [0, 1, 0, 0, 0, 0, 1, 0]
    assert [each.num_running for each in seconds[-8:]] == [0, 3, 3, 3, 3, 3, 1, 1], "what was so is so until it changes"
    assert [each.kv_usage for each in seconds[-8:]] == [0.0, *[1.0] * 5, 0.0, 0.0]


def test_what_has_not_changed_for_long_still_is_so() -> None:
    history, clock = create_history()
    history.record_step(StepRecord(), step(num_waiting=7))
    clock.now += 10 * MAX_SECONDS
    assert {each.num_waiting for each in history.list_seconds()} == {7}


def test_memory_ends_somewhere() -> None:
    history, clock = create_history()
    for _ in range(3 * MAX_SECONDS):
        clock.now += 1
        history.record_step(StepRecord(num_generation_tokens=1), step())
    assert len(history.list_seconds()) == MAX_SECONDS
    assert len(history._seconds) == MAX_SECONDS + 1


def test_of_nothing_there_is_no_mean() -> None:
    durations = Durations()
    assert durations.mean_s is None
    durations.add([1.0, 2.0])
    other = Durations()
    other.add([6.0])
    durations.merge(other)
    assert (durations.mean_s, durations.max_s) == (3.0, 6.0)
