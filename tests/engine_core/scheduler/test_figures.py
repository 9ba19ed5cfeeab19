"""What the scheduler tells of itself, where that is not the plain case (T1)."""

from __future__ import annotations

from tests.engine_core.scheduler.scenario_helpers import run_to_end
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
