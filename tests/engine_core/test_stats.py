from __future__ import annotations

import pytest

from engine_core.stats import SchedulerStats


@pytest.mark.parametrize(
    ("num_blocks", "num_free_blocks", "usage"),
    [(0, 0, 0.0), (8, 8, 0.0), (8, 6, 0.25), (8, 0, 1.0)],  # the first: nothing is loaded yet
)
def test_usage_is_the_share_of_blocks_that_have_an_owner(num_blocks: int, num_free_blocks: int, usage: float) -> None:
    assert SchedulerStats(num_blocks=num_blocks, num_free_blocks=num_free_blocks).kv_cache_usage == usage


def test_stats_of_nothing_say_so() -> None:
    assert SchedulerStats().kv_cache_usage == 0.0
    assert not any(getattr(SchedulerStats(), name) for name in SchedulerStats.__slots__)
