"""The noise of draws: uniform, and independent over tokens, output indices, seeds and purposes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from engine_core.model.noise import DrawPurpose, exponentials, uniforms

SAMPLE = DrawPurpose.SAMPLE
IDS = np.arange(60_000, dtype=np.uint32)
SOME_IDS = IDS[:100]


def along_tokens() -> NDArray[np.float64]:
    return uniforms(1, 0, SAMPLE, IDS).astype(np.float64)


def along_indices() -> NDArray[np.float64]:
    return np.concatenate([uniforms(1, index, SAMPLE, SOME_IDS) for index in range(600)]).astype(np.float64)


def along_seeds() -> NDArray[np.float64]:
    return np.concatenate([uniforms(seed, 0, SAMPLE, SOME_IDS) for seed in range(600)]).astype(np.float64)


WALKS = pytest.mark.parametrize("walk", [along_tokens, along_indices, along_seeds])


def check_even(cells: NDArray[np.int64], num_cells: int) -> None:
    """Chi-square: five standard deviations above what even cells give."""
    counts = np.bincount(cells, minlength=num_cells)
    expected = len(cells) / num_cells
    chi_square = float(((counts - expected) ** 2).sum() / expected)
    freedom = num_cells - 1
    assert abs(chi_square - freedom) < 5 * (2 * freedom) ** 0.5, f"{chi_square:.0f} for {freedom} degrees of freedom"


@WALKS
@pytest.mark.parametrize("zoom", [1, 2**8, 2**16], ids=["high bits", "middle bits", "low bits"])
def test_numbers_are_uniform(walk: Callable[[], NDArray[np.float64]], zoom: int) -> None:
    check_even((walk() * zoom % 1 * 64).astype(np.int64), 64)


@WALKS
@pytest.mark.parametrize("lag", [1, 2, 100, 256])
def test_neighbours_know_nothing_of_each_other(walk: Callable[[], NDArray[np.float64]], lag: int) -> None:
    """Along indices and seeds, 100 apart is the same token in the next draw."""
    steps = (walk() * 16).astype(np.int64)
    check_even(steps[:-lag] * 16 + steps[lag:], 256)


def test_the_least_of_many_exponentials_falls_on_each_token_alike() -> None:
    """What a draw is made of: who wins a race among equals."""
    winners = [int(exponentials(7, index, SAMPLE, SOME_IDS[:16]).argmin()) for index in range(8000)]
    check_even(np.array(winners), 16)


def test_exponentials_are_positive_and_finite_and_of_mean_1() -> None:
    noise = exponentials(3, 1, SAMPLE, np.arange(2**20, dtype=np.uint32))
    assert noise.dtype == np.float32
    assert 0.0 < noise.min() < 1e-5 and 10.0 < noise.max() < 17.0
    assert abs(float(noise.mean()) - 1.0) < 0.005 and abs(float(noise.std()) - 1.0) < 0.01


def test_a_tokens_number_does_not_depend_on_who_else_is_asked_about() -> None:
    whole = exponentials(5, 9, SAMPLE, IDS)
    for some in (IDS[17:18], IDS[::7], IDS[5:4321][::-1]):
        assert exponentials(5, 9, SAMPLE, some.copy()).tolist() == whole[some].tolist()


def test_every_argument_counts_and_any_seed_will_do() -> None:
    keys = [(0, 0), (1, 0), (0, 1), (-1, 0), (2**63 - 1, 0), (-(2**63), 0), (0, 2**40)]
    rows = {tuple(exponentials(seed, index, SAMPLE, IDS[:4]).tolist()) for seed, index in keys}
    assert len(rows) == len(keys)
