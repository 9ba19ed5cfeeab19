"""The storm of tests/long/storm.py, long enough for its second half to say something about memory: 3 minutes."""

from __future__ import annotations

import pytest

from tests.long.storm import check_memory, run_storm

pytestmark = pytest.mark.long


def test_after_a_storm_of_disconnects_nothing_is_held_and_everything_is_counted() -> None:
    figures = run_storm(num_requests=4000, num_streams=64, seed=2)
    assert sum(figures["clients"].values()) == 4000
    # Every kind of end has come up.
    assert set(figures["clients"]) >= {"refused", "whole", "whole stream", "left while waiting", "left amid its stream"}
    assert set(figures["requests"]) == {"stop", "length", "abort"}
    check_memory(figures["memory"])
