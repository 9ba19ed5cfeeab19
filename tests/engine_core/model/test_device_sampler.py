"""The device's sampler against the host's: the same token from the same logits, whatever the row and its neighbours."""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from engine_core.model import device_sampler
from engine_core.model.device_sampler import NUM_COLUMNS, Draw, build_record, greedy_record, pick_tokens, slots
from engine_core.model.sampler import OwnTokens, pick_token
from engine_core.sampling_params import SamplingParams
from kernels.testing.fake_cuda import FakeAccelerator

NOTHING = np.empty(0, np.int32)
NAN, INF = float("nan"), float("inf")


def params(**overrides: Any) -> SamplingParams:
    return SamplingParams(max_tokens=10, **overrides)


def pack(rows: Sequence[SamplingParams], output_index: int = 0) -> tuple[torch.Tensor, Draw]:
    records = [build_record(each, slot) for slot, each in enumerate(rows)]
    data = bytearray(b"".join(record.words(output_index) for record in records))
    packed = torch.frombuffer(data, dtype=torch.int32).view(-1, NUM_COLUMNS)
    return packed, Draw.of(functools.reduce(operator.or_, (record.draw for record in records)))


def on_device(logits: torch.Tensor, rows: Sequence[SamplingParams], output_index: int = 0) -> list[int]:
    records, draw = pack(rows, output_index)
    return pick_tokens(logits, records, draw).reported.tolist()


def on_host(logits: torch.Tensor, rows: Sequence[SamplingParams], output_index: int = 0) -> list[int]:
    tokens = OwnTokens(NOTHING, np.zeros(output_index, np.int32))
    return [pick_token(row.numpy(), each, tokens) for row, each in zip(logits, rows, strict=True)]


# What the rows of a step may ask for: top_k and top_p together.
CUTS: dict[Draw, list[tuple[int, float]]] = {
    Draw.RACE: [(0, 1.0)],
    Draw.TOP: [(1, 1.0), (2, 0.5), (40, 0.95), (256, 1e-9), (200, 0.99)],
    Draw.RACE_AND_TOP: [(0, 1.0), (1, 1.0), (40, 0.9)],
    Draw.SORT: [(0, 1.0), (0, 0.95), (0, 0.5), (0, 1e-9), (2, 0.5), (40, 0.95), (257, 1.0), (300, 0.9), (5000, 1.0)],
}


def random_params(generator: np.random.Generator, draw: Draw) -> SamplingParams:
    pick = generator.choice
    top_k, top_p = CUTS[draw][generator.integers(len(CUTS[draw]))]
    return params(
        temperature=float(pick([0.0, 0.3, 1.0, 2.0, 100.0])),
        top_k=top_k,
        top_p=top_p,
        min_p=float(pick([0.0, 0.02, 1.0])),
        seed=int(generator.integers(-(2**63), 2**63 - 1)),
    )


@pytest.mark.parametrize("draw", list(CUTS))
@pytest.mark.parametrize("spread", [0.5, 4.0])
def test_thousands_of_rows_get_the_hosts_token(monkeypatch: pytest.MonkeyPatch, draw: Draw, spread: float) -> None:
    monkeypatch.setattr(device_sampler, "_NUM_CANDIDATES", 300)
    generator = np.random.default_rng(draw)
    rows = [random_params(generator, draw) for _ in range(600)]
    assert pack(rows)[1] is draw
    logits = torch.from_numpy(generator.standard_normal((len(rows), 900)) * spread).bfloat16().float()  # some are equal
    found, expected = on_device(logits, rows, 3), on_host(logits, rows, 3)
    num_equal = sum(mine == theirs for mine, theirs in zip(found, expected, strict=True))
    assert num_equal >= 0.999 * len(rows)
    assert len(set(expected)) > 200


def test_a_rows_token_does_not_depend_on_its_place_or_its_neighbours() -> None:
    generator = np.random.default_rng(4)
    rows = [random_params(generator, list(CUTS)[place % 4]) for place in range(40)]
    logits = torch.from_numpy(generator.standard_normal((40, 200)).astype(np.float32))
    whole = on_device(logits, rows)
    order = generator.permutation(40).tolist()
    assert on_device(logits[order], [rows[place] for place in order]) == [whole[place] for place in order]
    assert [on_device(logits[at : at + 1], rows[at : at + 1])[0] for at in range(40)] == whole


def test_a_sort_in_parts_is_a_sort(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = np.random.default_rng(5)
    rows = [random_params(generator, Draw.SORT) for _ in range(10)]
    logits = torch.from_numpy(generator.standard_normal((10, 50)).astype(np.float32))
    whole = on_device(logits, rows)
    monkeypatch.setattr(device_sampler, "_MAX_SORTED_BYTES", 4 * 50 * 3)
    assert on_device(logits, rows) == whole


@pytest.mark.parametrize("top_k", [1, 2, 3, 7])
def test_of_equal_logits_exactly_k_stay_and_the_lower_ids_first(top_k: int) -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 0.0, 2.0, 2.0, 1.0]]).repeat(400, 1)
    rows = [params(temperature=50.0, top_k=top_k, seed=seed) for seed in range(400)]
    assert set(on_device(logits, rows)) == set([1, 2, 4, 5, 0, 6, 3][:top_k])


@pytest.mark.parametrize(("top_p", "num_kept"), [(0.3, 3), (0.30000001, 4), (0.7, 7), (0.09, 1), (0.91, 10)])
def test_a_nucleus_ends_where_float64_says(top_p: float, num_kept: int) -> None:
    """Ten tokens weigh the same: 0.3 as an fp32 is more than 0.3, and would let a fourth in."""
    logits = torch.zeros(300, 12)
    logits[:, [3, 7]] = -200.0
    rows = [params(temperature=1.0, top_p=top_p, seed=seed) for seed in range(300)]
    likeliest = [token_id for token_id in range(12) if token_id not in (3, 7)]
    assert set(on_device(logits, rows)) == set(likeliest[:num_kept])
    assert on_device(logits, rows) == on_host(logits, rows)


def test_a_nucleus_is_of_what_top_k_left_and_min_p_of_the_heaviest() -> None:
    logits = torch.log(torch.tensor([[0.4, 0.3, 0.2, 0.1]])).repeat(300, 1)
    rows = [params(top_k=2, top_p=0.5, seed=seed) for seed in range(300)]  # 0.4 of 0.7 is enough
    assert set(on_device(logits, rows)) == {0}
    rows = [params(min_p=0.6, seed=seed) for seed in range(300)]
    assert set(on_device(logits, rows)) == {0, 1}


def test_greedy_is_the_lowest_of_the_greatest_in_any_draw() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0], [7.0, -3e38, 7.0], [-2.0, -1.0, -1.0]])
    records, _ = pack([params(temperature=0.0)] * 3)
    for draw in Draw:
        assert pick_tokens(logits, records, draw).reported.tolist() == [1, 0, 1]


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-3])
def test_a_temperature_of_almost_nothing_picks_the_greatest(temperature: float) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, 1.5]]).repeat(50, 1)
    rows = [params(temperature=temperature, seed=seed, top_p=0.9 if seed % 2 else 1.0) for seed in range(50)]
    assert set(on_device(logits, rows)) == {2}


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("draw", list(Draw))
def test_a_row_that_is_not_finite_is_told_and_spoils_no_other(bad: float, draw: Draw) -> None:
    generator = np.random.default_rng(6)
    asked = {Draw.GREEDY: [(0, 1.0)], **CUTS}[draw]
    rows = [
        params(
            temperature=float(draw > Draw.GREEDY),
            top_k=asked[n % len(asked)][0],
            top_p=asked[n % len(asked)][1],
            seed=n,
        )
        for n in range(5)
    ]
    logits = torch.from_numpy(generator.standard_normal((5, 30)).astype(np.float32))
    clean = on_device(logits, rows)
    logits[2, 11] = bad
    records, most = pack(rows)
    assert most is draw
    picked = pick_tokens(logits, records, draw)
    assert picked.reported.tolist() == [*clean[:2], -1, *clean[3:]]
    assert picked.token_ids.tolist() == [*clean[:2], 0, *clean[3:]]
    assert logits[2, 11].isnan() if bad != bad else logits[2, 11] == bad, "logprobs may still be asked of it"


@pytest.mark.parametrize("draw", list(Draw))
def test_it_asks_nothing_of_the_host(draw: Draw) -> None:
    accelerator = FakeAccelerator()
    rows = [params(temperature=1.0, top_k=3 * (n % 2), seed=n) for n in range(4)]
    records, _ = pack(rows)
    logits = torch.randn(4, 20, generator=torch.Generator().manual_seed(0))
    kept = torch.zeros(4, dtype=torch.int32)
    with torch.inference_mode():
        graph = accelerator.capture(lambda: kept.copy_(pick_tokens(logits, records, draw).reported))
        for seed in range(3):
            logits.copy_(torch.randn(4, 20, generator=torch.Generator().manual_seed(seed)))
            graph.replay()
            assert kept.tolist() == pick_tokens(logits, records, draw).reported.tolist()


def test_a_record_says_what_its_rows_take_and_where_its_tokens_go() -> None:
    draws = [
        (params(temperature=0.0, top_k=5, top_p=0.1), Draw.GREEDY),
        (params(min_p=0.5), Draw.RACE),
        (params(top_k=256, top_p=0.5), Draw.TOP),
        (params(top_k=257), Draw.SORT),
        (params(top_p=0.99), Draw.SORT),
        (params(top_k=2**40), Draw.SORT),
    ]
    assert [build_record(each, 0).draw for each, _ in draws] == [draw for _, draw in draws]
    assert slots(pack([each for each, _ in draws])[0]).tolist() == [0, 1, 2, 3, 4, 5]
    assert [Draw.of(one | other) for one, other in ((0, 0), (1, 2), (2, 2), (4, 1), (4, 3))] == [0, 3, 2, 4, 4]
    assert len(greedy_record(7)) == len(build_record(params(), 7).words(0)) == 4 * NUM_COLUMNS
    assert np.frombuffer(greedy_record(7), np.int32)[5] == 7
