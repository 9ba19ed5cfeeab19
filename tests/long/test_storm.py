"""A small storm; `python -m tests.long.storm` makes one of 1,000 requests over 64 streams."""

from __future__ import annotations

import pytest

from tests.long.storm import check_memory, run_storm

pytestmark = pytest.mark.long


def test_after_a_storm_of_disconnects_nothing_is_held_and_everything_is_counted() -> None:
    figures = run_storm(num_requests=200, num_streams=32, seed=2)
    assert sum(figures["clients"].values()) == 200
    # Every kind of end has come up.
    assert set(figures["clients"]) >= {"refused", "whole", "whole stream", "left while waiting", "left amid its stream"}
    assert set(figures["requests"]) == {"stop", "length", "abort"}
    check_memory(figures["memory"])
