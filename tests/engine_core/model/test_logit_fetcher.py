"""Rows of logits on their way to the host: those that were asked for, in as few copies as their runs."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from engine_core.model import logit_fetcher
from engine_core.model.logit_fetcher import LogitFetcher
from kernels.testing.fake_cuda import FakeAccelerator


@pytest.mark.parametrize(
    ("wanted", "num_copies"), [([], 0), ([4], 1), ([0, 1, 2], 1), ([1, 3, 4, 7], 3), (list(range(8)), 1)]
)
@pytest.mark.parametrize("num_ids", [5, 9])
def test_each_wanted_row_is_itself(wanted: list[int], num_copies: int, num_ids: int) -> None:
    accelerator = FakeAccelerator()
    padded = torch.randn(8, 9, generator=torch.Generator().manual_seed(1))
    rows = LogitFetcher(accelerator, 9).fetch(padded[:, :num_ids], wanted)
    assert list(rows) == wanted
    assert all(np.array_equal(rows[index], padded[index, :num_ids].numpy()) for index in wanted)
    assert accelerator.count("download") == num_copies
    assert accelerator.count("pinned") == (len(wanted) > 0), "nothing is pinned for those who never ask"


def test_a_wide_vocabulary_comes_in_smaller_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_fetcher, "_MAX_BYTES", 4 * 100 * 3)
    assert [LogitFetcher(FakeAccelerator(), width).max_num_rows for width in (50, 100, 301)] == [6, 3, 1]
