"""The oracle itself: it must see what it is there to see."""

from __future__ import annotations

import pytest

from tests.engine_core.fake_runner import sample_token
from tests.engine_core.scheduler.scheduler_helpers import Harness, create_scheduler


def test_the_fake_runner_notices_wrong_kv() -> None:
    h = Harness(create_scheduler())
    h.add("A", 20, 5)
    h.step()
    h.runner.spoil([h.table("A")[0]])
    with pytest.raises(AssertionError, match="wrong KV at position 0"):
        h.step()


def test_the_fake_model_depends_on_context_seed_and_position() -> None:
    draws = {sample_token(c, s, i) for c in range(4) for s in range(4) for i in range(4)}
    assert draws == set(range(16))
