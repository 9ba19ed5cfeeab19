from __future__ import annotations

import math
import random

import pytest

from engine_core.scheduler.step_cost import StepCost, StepLoad


def take_s(load: StepLoad) -> float:
    """A machine whose time is exactly what the model can say."""
    return (
        0.004
        + 1e-4 * load.num_decodes
        + 1e-7 * load.num_decode_pairs
        + 2e-4 * load.num_prompt_tokens
        + 1e-7 * load.num_prompt_pairs
    )


def draw_load(rng: random.Random) -> StepLoad:
    """Any step."""
    num_decodes, num_prompt_tokens = rng.randrange(33), rng.choice([0, 0, 16, 100, 256, 512])
    return StepLoad(
        num_decodes, num_decodes * rng.randrange(2000), num_prompt_tokens, num_prompt_tokens * rng.randrange(2000)
    )


def learnt(num_steps: int = 300, *, noise: float = 0.0) -> StepCost:
    """Return a model that has seen a machine at work."""
    cost, rng = StepCost(), random.Random(3)
    for _ in range(num_steps):
        load = draw_load(rng)
        cost.learn(load, take_s(load) * rng.gauss(1.0, noise))
    return cost


@pytest.mark.parametrize(("noise", "error"), [(0.0, 0.03), (0.05, 0.15)])
def test_it_predicts_steps_that_it_has_not_seen(noise: float, error: float) -> None:
    cost, rng = learnt(noise=noise), random.Random(4)
    for _ in range(100):
        load = draw_load(rng)
        assert cost.predict(load) == pytest.approx(take_s(load), rel=error)


def test_before_the_first_step_nothing_costs_anything() -> None:
    assert StepCost().predict(StepLoad(4, 100, 100, 100.0)) == 0.0
    assert StepCost().count_prompt_tokens(StepLoad(4, 100), 0, 0.05) == math.inf


@pytest.mark.parametrize("start", [0, 500, 5000])
@pytest.mark.parametrize("load", [StepLoad(), StepLoad(4, 1000), StepLoad(4, 1000, 40, 9000.0)])
def test_as_many_tokens_as_are_counted_fill_the_time(load: StepLoad, start: int) -> None:
    cost = learnt()
    count = cost.count_prompt_tokens(load, start, 0.05)
    pairs = load.num_prompt_pairs + count * (start + count / 2.0)
    full = StepLoad(load.num_decodes, load.num_decode_pairs, load.num_prompt_tokens + count, pairs)  # type: ignore[arg-type]
    assert count > 10 and cost.predict(full) == pytest.approx(0.05)


def test_no_token_fits_where_the_step_is_too_long_as_it_is() -> None:
    assert learnt().count_prompt_tokens(StepLoad(32, 1000), 0, 0.002) == 0.0


def test_plain_decodes_do_not_blur_what_a_prompt_costs() -> None:
    cost, prompt = learnt(), StepLoad(4, 400, 256, 100_000.0)
    for num_tokens in range(20_000):
        decode = StepLoad(4, 400 + num_tokens % 4000)
        cost.learn(decode, take_s(decode))
    assert cost.predict(prompt) == pytest.approx(take_s(prompt), rel=0.05)
    cost.learn(prompt, 1.35 * take_s(prompt))
    assert cost.predict(prompt) < 1.2 * take_s(prompt), "nor do they make the next one count for all"


def test_one_odd_step_moves_little_and_a_second_one_is_believed() -> None:
    cost, load = learnt(noise=0.05), StepLoad(4, 400, 128, 50_000.0)
    before = cost.predict(load)
    assert cost.learn(load, 10.0 * before) == pytest.approx(9.0)
    assert before <= cost.predict(load) < 1.25 * before
    cost.learn(load, take_s(load))
    assert cost.predict(load) < 1.25 * before, "an ordinary step ends the matter"
    for _ in range(3):
        cost.learn(load, 3.0 * before)
    assert cost.predict(load) == pytest.approx(3.0 * before, rel=0.1)


def test_a_slow_and_a_fast_accident_are_no_news() -> None:
    cost, load = learnt(noise=0.05), StepLoad(4, 400, 128, 50_000.0)
    before = cost.predict(load)
    for factor in (10.0, 0.1) * 5:
        cost.learn(load, factor * before)
    assert cost.predict(load) == pytest.approx(before, rel=0.4)


def test_a_dreadful_first_step_is_forgotten() -> None:
    cost, rng = StepCost(), random.Random(5)
    cost.learn(StepLoad(0, 0, 100, 5000.0), 60.0)
    for _ in range(60):
        load = draw_load(rng)
        cost.learn(load, take_s(load))
    load = StepLoad(8, 8000, 128, 50_000.0)
    assert cost.predict(load) == pytest.approx(take_s(load), rel=0.1)


def test_nothing_ever_gains_time() -> None:
    cost, rng = StepCost(), random.Random(6)
    for _ in range(3000):
        cost.learn(draw_load(rng), rng.choice([1e-6, 0.01, 0.02, 5.0]))
        for load in (StepLoad(), StepLoad(64), StepLoad(1, 10**6), StepLoad(0, 0, 512), StepLoad(0, 0, 1, 10.0**6)):
            assert cost.predict(load) >= cost.predict(StepLoad()) >= 0.0
