"""What the scheduler tells of itself, where that is not the plain case (T1)."""

from __future__ import annotations

import pytest

from tests.engine_core.scheduler.scenario_helpers import Park, run_to_end
from tests.engine_core.scheduler.scheduler_helpers import Harness, create_scheduler


def test_t1_a_parked_request_is_one_that_waits() -> None:
    h = Harness(create_scheduler(num_blocks=4, block_size=4, max_steps_in_flight=2))
    h.add("A", 7, 6)
    h.add("B", 7, 6)
    h.step()
    h.step()
    h.schedule()
    assert list(h.scheduler.parked) == ["B"] and len(h.scheduler.waiting) == 0
    stats = h.scheduler.make_stats()
    assert (stats.num_running, stats.num_waiting, stats.num_parked) == (1, 1, 1)
    run_to_end(h)


def test_t1_without_a_cache_nothing_is_looked_up() -> None:
    h = Harness(create_scheduler(num_blocks=4, block_size=4, enable_prefix_caching=False))
    h.add("A", 7, 6)
    h.add("B", 7, 6)
    h.drain()
    stats = h.scheduler.make_stats()
    assert stats.num_preempted == 1, "both kinds of admission have happened"
    assert (stats.num_prefix_queries, stats.num_resumed_queries) == (0, 0)


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_g11_each_step_counts_its_own_tokens_however_far_the_scheduler_runs_ahead(max_steps_in_flight: int) -> None:
    h = Harness(create_scheduler(max_num_batched_tokens=4, max_num_seqs=4, max_steps_in_flight=max_steps_in_flight))
    h.add("A", 10, 3)
    steps = []
    while h.has_work:
        h.step()
        stats = h.scheduler.make_stats()
        steps += [(stats.num_step_prompt_tokens, stats.num_step_generation_tokens)] * stats.num_steps
    assert steps == [(4, 0), (4, 0), (2, 1), (0, 1), (0, 1)]


def test_g11_what_brings_news_without_computing_anything_is_no_step() -> None:
    h = Harness(create_scheduler())
    h.add("A", 10, 3)
    h.step()
    h.scheduler.make_stats()
    h.abort("A")
    assert h.schedule() == {} and h.output is not None and h.output.has_news, "the runner hears of the end"
    h.update()
    assert h.scheduler.make_stats().num_steps == 0


def test_t1_a_request_that_a_constraint_passes_over_is_held_back_until_it_is_not() -> None:
    park = Park("A")
    h = Harness(create_scheduler(constraints=[park]))
    h.add("A", 4, 2)
    h.add("B", 4, 9)
    h.step()
    stats = h.scheduler.make_stats()
    assert (stats.num_running, stats.num_waiting, stats.num_held_back) == (1, 1, 1)
    h.abort("A")
    assert h.scheduler.make_stats().num_held_back == 0
    park.request_ids.add("C")
    h.add("C", 4, 2)
    h.step()
    assert h.scheduler.make_stats().num_held_back == 1
    park.request_ids.clear()
    h.add("D", 4, 2)
    h.step()
    stats = h.scheduler.make_stats()
    assert (stats.num_running, stats.num_waiting, stats.num_held_back) == (3, 0, 0)
