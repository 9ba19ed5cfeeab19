"""The same events give the same outputs, byte for byte: in one process, and in processes that hash strings differently.

Source: scheduler.md I19, S6.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest

from tests.engine_core.scheduler.event_player import Player, random_load

_TRACE = """
import random
import sys
from tests.engine_core.scheduler.test_replay import trace
for seed in map(int, sys.argv[1:]):
    print("\\n".join(trace(seed)))
"""
SEEDS = range(30)


class Recorder(Player):
    """Writes down every output of schedule(), and all that the clients heard."""

    def __init__(self, seed: int) -> None:
        config, self.events = random_load(random.Random(seed))
        super().__init__(config)
        self.lines: list[str] = []

    def _check_step(self, counts: dict[str, int]) -> None:
        super()._check_step(counts)
        self.lines.append(repr(self.harness.output))


def trace(seed: int) -> list[str]:
    """Return what a random load does."""
    recorder = Recorder(seed)
    recorder.play(recorder.events)
    recorder.drain()
    return [*recorder.lines, repr(recorder.harness.token_ids), repr(recorder.harness.last)]


@pytest.mark.parametrize("seed", range(5))
def test_i19_a_replay_is_byte_equal(seed: int) -> None:
    assert trace(seed) == trace(seed)


def test_i19_s6_decisions_do_not_depend_on_string_hashes() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", _TRACE, *map(str, SEEDS)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    # The loads are what they claim to be: preemptions, drafts, both policies, steps ahead.
    assert "preempted_req_ids=['r" in outputs[0] and "scheduled_spec_decode_tokens={'r" in outputs[0]
    configs = [random_load(random.Random(seed))[0] for seed in SEEDS]
    assert {config["policy"] for config in configs} == {"fcfs", "priority"}
    assert {config["max_steps_in_flight"] for config in configs} >= {1, 2, 3}
