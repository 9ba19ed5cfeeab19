"""The cuda backend over the real FlashInfer's Python, whose compiled kernels alone are stand-ins."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from kernels.flashinfer_backend import FlashInferBackend
from kernels.testing.fake_cuda import FakeAccelerator
from kernels.torch_backend import TorchBackend
from tests.kernels.attention_case import create_case, create_spec, rotary_rows, run_paged
from tests.kernels.decoding_case import DecodingCase, attend_layers
from tests.kernels.real_flashinfer import import_flashinfer, stand_in_kernels
from tests.kernels.test_flashinfer_plans import CapturedStep, assert_all_close

REFERENCE = TorchBackend()
TOLERANCE = {"rtol": 2e-2, "atol": 2e-2}
WORKSPACE_BYTES = 1 << 20  # stand-in kernels need none
KINDS = (create_spec(), create_spec(window_left=20), create_spec(soft_cap=3.0))
LONG = (257, 258, 272, 273, 288, 300, 320, 257)  # behind 16 shared pages


@pytest.fixture(scope="module")
def flashinfer() -> Iterator[ModuleType]:
    library = import_flashinfer()
    with stand_in_kernels(library):
        yield library


@pytest.fixture
def backend(flashinfer: ModuleType) -> FlashInferBackend:
    return FlashInferBackend(
        flashinfer=flashinfer, accelerator=FakeAccelerator(), num_workspace_bytes=WORKSPACE_BYTES
    )


@pytest.mark.parametrize("kind", KINDS, ids=["plain", "window", "cap"])
def test_flashinfer_python_takes_any_step(backend: FlashInferBackend, kind: object) -> None:
    """The long query has the library choose fa3, the others fa2."""
    for requests in (((1, 5), (1, 70), (33, 40)), ((1, 5), (65, 80))):
        case = create_case(kind, requests, dtype=torch.bfloat16)  # type: ignore[arg-type]
        made, expected = (run_paged(each, case, page_size=16) for each in (backend, REFERENCE))
        torch.testing.assert_close(made, expected, **TOLERANCE)


@torch.inference_mode()
def test_flashinfer_python_takes_graphs(backend: FlashInferBackend) -> None:
    case = DecodingCase(backend, KINDS, (1, 15, 16, 50))
    graphs = [CapturedStep(backend, case, size) for size in (4, 8)]
    for step in range(6):
        meta, heads, expected = case.next_step()
        captured = graphs[step % 2]
        assert_all_close(captured.replay(captured.plan(meta), heads), expected)


@torch.inference_mode()
def test_flashinfer_python_takes_shared_prefixes(backend: FlashInferBackend) -> None:
    case = DecodingCase(backend, KINDS[:1], LONG, num_shared_pages=16)
    captured = CapturedStep(backend, case, 9, is_shared=True)
    for _ in range(3):
        meta, heads, expected = case.next_step()
        assert_all_close(captured.replay(captured.plan(meta), heads), expected)
    meta, heads, expected = case.next_step()
    assert_all_close(attend_layers(backend, meta, heads, case.kv), expected)


@pytest.mark.parametrize("width", [torch.bfloat16, torch.float32])
def test_flashinfer_python_takes_what_is_not_attention(backend: FlashInferBackend, width: torch.dtype) -> None:
    results = []
    for each in (backend, REFERENCE):
        torch.manual_seed(0)
        x, residual, weight = torch.randn(3, 64).bfloat16(), torch.randn(3, 64).bfloat16(), torch.rand(64).to(width)
        q, k = torch.randn(3, 3, 64).bfloat16().split((2, 1), dim=1)
        normed = each.rmsnorm(x, weight, 1e-6)
        each.qk_norm_rope_(q, k, weight, weight, rotary_rows(3, 64), 1e-6)
        gates = [each.act_mul(residual, "silu"), each.act_mul(residual, "gelu_tanh")]
        each.add_rmsnorm_(x, residual, weight, 1e-6)
        results.append([normed, q, k, *gates, x, residual])
    assert_all_close(*results)
