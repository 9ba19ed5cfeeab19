"""The device's noise against the host's: the same bits, whatever the row."""

from __future__ import annotations

import numpy as np
import torch

from engine_core.model import noise
from engine_core.model.device_noise import exponentials, hash_ids

SEEDS = [(0, 0), (1, 0), (1, 1), (-1, 7), (2**63, 2**40), (-(2**63), 3), (123456789, 8191)]
IDS = np.concatenate([np.arange(70_000, dtype=np.uint32), np.uint32(2**32 - 1) - np.arange(999, dtype=np.uint32)])


def keys_of(pairs: list[tuple[int, int]]) -> torch.Tensor:
    data = b"".join(noise.key_bytes(seed, index, noise.DrawPurpose.SAMPLE) for seed, index in pairs)
    return torch.frombuffer(bytearray(data), dtype=torch.int32).view(-1, 3)


def test_the_hash_is_bit_equal() -> None:
    found = hash_ids(keys_of(SEEDS), torch.from_numpy(IDS.view(np.int32))).numpy().view(np.uint32)
    for row, (seed, index) in zip(found, SEEDS, strict=True):
        expected = noise._hash(noise._key(seed, index, noise.DrawPurpose.SAMPLE), IDS)
        assert np.array_equal(row, expected)


def test_exponentials_are_equal_to_a_unit_in_the_last_place() -> None:
    found = exponentials(keys_of(SEEDS), torch.from_numpy(IDS.view(np.int32))).numpy()
    for row, (seed, index) in zip(found, SEEDS, strict=True):
        expected = noise.exponentials(seed, index, noise.DrawPurpose.SAMPLE, IDS)
        assert np.abs(row.view(np.int32) - expected.view(np.int32)).max() <= 1
        assert row.min() > 0.0 and np.isfinite(row).all()


def test_a_row_of_ids_of_its_own_gets_the_numbers_of_those_ids() -> None:
    shuffled = torch.stack([torch.randperm(500, generator=torch.Generator().manual_seed(n)) for n in range(7)])
    by_id = exponentials(keys_of(SEEDS), torch.arange(500, dtype=torch.int32))
    assert torch.equal(exponentials(keys_of(SEEDS), shuffled.to(torch.int32)), by_id.gather(1, shuffled))
