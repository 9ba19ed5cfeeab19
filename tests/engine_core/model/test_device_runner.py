"""The device's runner against the plain one, over the same model: token for token, whatever is in flight."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.engine_core.model.device_steps import Asked, Engine, Machine, build_machine, run_device, run_plain

GREEDY: dict[str, Any] = {"temperature": 0.0}
RANDOM: dict[str, Any] = {"temperature": 1.3}
CUT: dict[str, Any] = {"temperature": 1.1, "top_k": 20, "top_p": 0.9}


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Machine:
    return build_machine(tmp_path_factory.mktemp("model"))


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(3, 90), k=num_tokens)


MIXED = [
    Asked(prompt(9, 1), GREEDY),
    Asked(prompt(5, 2), {**RANDOM, "seed": 5}),
    Asked(prompt(14, 3), {**CUT, "seed": 6}, arrives=2),
    Asked(prompt(3, 4), {"temperature": 0.7, "min_p": 0.05, "seed": -7}, arrives=3),
    Asked(prompt(30, 5), {**GREEDY, "max_tokens": 4}, arrives=4),
    Asked(prompt(6, 6), {**RANDOM, "top_p": 0.6, "seed": 8}, arrives=9),
]


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_every_request_gets_what_the_plain_runner_gives_it(machine: Machine, enforce_eager: bool, depth: int) -> None:
    expected = run_plain(machine, MIXED)
    assert run_device(machine, MIXED, enforce_eager=enforce_eager, depth=depth) == expected
    assert len({tuple(got.token_ids) for got in expected.values()}) == len(MIXED)
