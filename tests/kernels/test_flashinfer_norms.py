"""Norms over the fake FlashInfer, whose kernels refuse a weight of another dtype than x's."""

from __future__ import annotations

import pytest
import torch

from kernels.flashinfer_norms import Norms
from kernels.testing.fake_flashinfer import FakeFlashInfer
from kernels.torch_backend import TorchBackend

REFERENCE = TorchBackend()
TOLERANCE = {"rtol": 1e-2, "atol": 1e-2}
BF16 = torch.bfloat16

# w of all sizes: those below 2**-17 lose bits in 1 + w, and none that count in w.
TRAINED = torch.randn(64) * torch.logspace(-9, 1, 64)
WEIGHTS = {
    "half": (TRAINED.to(BF16), "rmsnorm"),
    "gemma": (TRAINED.to(BF16).float() + 1, "gemma_rmsnorm"),
    "any": (TRAINED + 1, None),
}
weights = pytest.mark.parametrize("kind", list(WEIGHTS))


@weights
@pytest.mark.parametrize("shape", [(5, 64), (5, 3, 64)], ids=["rows", "heads"])
def test_a_norm_takes_the_kernel_that_loses_no_bit(kind: str, shape: tuple[int, ...]) -> None:
    weight, kernel = WEIGHTS[kind]
    library = FakeFlashInfer()
    norms = Norms(library)
    x = torch.randn(*shape).to(BF16)
    out = torch.empty_like(x)
    norms.norm_into(out, x, weight, 1e-6)
    torch.testing.assert_close(out, REFERENCE.rmsnorm(x, weight, 1e-6), **TOLERANCE)
    assert [call.name for call in library.calls] == ([kernel] if kernel else [])
    if kernel == "gemma_rmsnorm":  # norm.cu has it for rows alone
        assert len(library.calls[0].args[0].shape) == 2


@weights
def test_heads_of_a_fused_projection_are_normed_in_place(kind: str) -> None:
    weight, _ = WEIGHTS[kind]
    fused = torch.randn(5, 4, 64).to(BF16)
    before = fused.clone()
    heads = fused[:, :3]
    Norms(FakeFlashInfer()).norm_into(heads, heads, weight, 1e-6)
    torch.testing.assert_close(heads, REFERENCE.rmsnorm(before[:, :3], weight, 1e-6), **TOLERANCE)
    assert torch.equal(fused[:, 3], before[:, 3])


@weights
def test_add_and_norm(kind: str) -> None:
    weight, kernel = WEIGHTS[kind]
    library = FakeFlashInfer()
    x, residual = torch.randn(2, 7, 64).to(BF16)
    other_x, other_residual = x.clone(), residual.clone()
    Norms(library).add_norm_(x, residual, weight, 1e-6)
    REFERENCE.add_rmsnorm_(other_x, other_residual, weight, 1e-6)
    assert torch.equal(residual, other_residual)
    torch.testing.assert_close(x, other_x, rtol=2e-2, atol=2e-2)
    fused = {"rmsnorm": ["fused_add_rmsnorm"], "gemma_rmsnorm": ["gemma_fused_add_rmsnorm"], None: []}
    assert [call.name for call in library.calls] == fused[kernel]


def test_a_weight_is_looked_at_once() -> None:
    """The first step may ask the device; a captured one may not."""
    weight, _ = WEIGHTS["gemma"]
    norms = Norms(FakeFlashInfer())
    x = torch.randn(2, 64).to(BF16)
    for _ in range(2):
        norms.norm_into(x, x, weight, 1e-6)
        assert len(norms._offsets) == 1
    known = norms._offset(weight, BF16)
    assert known is norms._offset(weight, BF16)
