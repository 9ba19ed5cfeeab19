"""The cuda backend on a machine made of the two fakes."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from kernels.flashinfer_backend import DenseLinear, FlashInferBackend
from kernels.testing.fake_cuda import FakeAccelerator
from kernels.testing.fake_flashinfer import FakeFlashInfer

# What the fake demands for the shapes of these tests; the real backend's 128 MiB would be zeroed for each test.
WORKSPACE_BYTES = 32 << 20


def create_backend(*, capability: tuple[int, int] = (9, 0)) -> FlashInferBackend:
    accelerator = FakeAccelerator(capability=capability)
    return FlashInferBackend(
        flashinfer=FakeFlashInfer(accelerator), accelerator=accelerator, num_workspace_bytes=WORKSPACE_BYTES
    )


class RowByRowBackend(FlashInferBackend):
    """The cuda backend with linears that round once: a row is the same, bit by bit, whoever shares the batch.

    What torch has for bf16 on a CPU, as cuBLAS on a card, may add a row up in another order where there are more rows.

    Args:
        accelerator: Where it computes.
        graph_sizes: Batch sizes that are captured.
    """

    def __init__(self, accelerator: FakeAccelerator | None = None, *, graph_sizes: Sequence[int] = (1, 3)) -> None:
        card = accelerator or FakeAccelerator()
        super().__init__(flashinfer=FakeFlashInfer(card), accelerator=card, num_workspace_bytes=WORKSPACE_BYTES)
        self._graph_sizes = graph_sizes

    def graph_sizes(self, max_num_reqs: int) -> tuple[int, ...]:
        return tuple(size for size in self._graph_sizes if size <= max_num_reqs)

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> DenseLinear:
        return DenseLinear(weight.double(), None if bias is None else bias.double())

    def linear(self, x: torch.Tensor, packed: DenseLinear) -> torch.Tensor:
        return F.linear(x.double(), packed.weight, packed.bias).to(x.dtype)
