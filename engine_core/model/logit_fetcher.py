"""LogitFetcher: brings rows of logits to the host, those that it must look at itself."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from engine_core.model.noise import FloatRow
from kernels.accelerator import Accelerator

# Logits that come at a time. Their memory is page-locked, hence nobody else's for good.
_MAX_BYTES = 32 << 20


class LogitFetcher:
    """Copies rows into pinned memory, allocated when it is first needed.

    Args:
        accelerator: Copies.
        vocab_size: Width of a row, with padding.

    Attributes:
        max_num_rows: That fetch() may be asked for at a time.
    """

    def __init__(self, accelerator: Accelerator, vocab_size: int) -> None:
        self.max_num_rows = max(1, _MAX_BYTES // (4 * vocab_size))
        self._accelerator = accelerator
        self._vocab_size = vocab_size
        self._pinned: torch.Tensor | None = None

    def fetch(self, logits: torch.Tensor, wanted: Sequence[int]) -> dict[int, FloatRow]:
        """Wait for rows and return them by their index; good until the next call.

        Args:
            logits: [n, V] fp32 on the device, n at most ``max_num_rows``.
            wanted: Which rows, ascending.
        """
        if not wanted:
            return {}
        if self._pinned is None:
            self._pinned = self._accelerator.pinned(self.max_num_rows * self._vocab_size)
        num_ids = logits.shape[1]
        target = self._pinned[: len(wanted) * num_ids].view(-1, num_ids)
        sources = []
        for first, stop, place in _runs(wanted):
            source = logits[first:stop].contiguous().view(torch.int32)
            event = self._accelerator.download(source, target[place : place + stop - first])
            sources.append((event, source))  # the source stays alive until its copy has ended
        for event, _ in sources:
            event.synchronize()
        rows = target.numpy().view(np.float32)
        return {index: rows[place] for place, index in enumerate(wanted)}


def _runs(wanted: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return runs of neighbours: first row, the row behind the last, and how many rows were before."""
    runs: list[tuple[int, int, int]] = []
    for place, index in enumerate(wanted):
        if runs and runs[-1][1] == index:
            first, _, before = runs[-1]
            runs[-1] = (first, index + 1, before)
        else:
            runs.append((index, index + 1, place))
    return runs
