"""The cuda backend over the real FlashInfer's Python, whose compiled kernels alone are stand-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from kernels.flashinfer_backend import FlashInferBackend
from kernels.testing import fake_flashinfer
from kernels.testing.fake_cuda import FakeAccelerator
from kernels.torch_backend import TorchBackend
from tests.kernels.attention_case import create_case, create_spec, rotary_rows, run_paged
from tests.kernels.decoding_case import DecodingCase, attend_layers
from tests.kernels.real_flashinfer import import_flashinfer, stand_in_kernels
from tests.kernels.test_flashinfer_plans import CapturedStep, assert_all_close
from tests.kernels.testing.flashinfer_case import (
    HEAD_DIM,
    HEADS,
    WORKSPACE,
    Step,
    create_buffers,
    decode,
    graph_wrapper,
    ints,
    plan_graph,
    pool,
    prefill,
    random,
)

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
    return FlashInferBackend(flashinfer=flashinfer, accelerator=FakeAccelerator(), num_workspace_bytes=WORKSPACE_BYTES)


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
        x, residual = torch.randn(3, 64).bfloat16(), torch.randn(3, 64).bfloat16()
        weight = (1 + torch.rand(64).bfloat16().float()).to(width)  # in fp32: Gemma's
        q, k = torch.randn(3, 3, 64).bfloat16().split((2, 1), dim=1)
        normed = each.rmsnorm(x, weight, 1e-6)
        each.qk_norm_rope_(q, k, weight, weight, rotary_rows(3, 64), 1e-6)
        gates = [each.act_mul(residual, "silu"), each.act_mul(residual, "gelu_tanh")]
        each.add_rmsnorm_(x, residual, weight, 1e-6)
        results.append([normed, q, k, *gates, x, residual])
    assert_all_close(*results)


# ---------------------------------------------------------------------- what the library itself refuses

REFUSALS = (ValueError, AssertionError, KeyError, AttributeError, RuntimeError, TypeError)
EAGER: tuple[dict[str, Any], ...] = (
    {"workspace": WORKSPACE[8:]},
    {"options": {"q_data_type": "float16"}},
    {"options": {"q_data_type": 16}},
    {"options": {"kv_data_type": torch.float16}},
    {"q": random(6, HEADS, HEAD_DIM)},
    {"q": random(4, HEADS, HEAD_DIM).half()},
    {"pool": pool().half()},
    {"pool": pool()[0]},
    {"run": {"window_left": 3}},
    {"run": {"lse": torch.zeros(1, HEADS), "return_lse": True}},
    {"run": {"out": random(4, HEADS, 32)}},
    {"create": {"kv_layout": "DHN"}},
    {"create": {"use_cuda_graph": True}},
)
GRAPH: tuple[dict[str, Any], ...] = (
    {"kv": ints(0, 1, 2, 5), "last": ints(1, 1, 1)},
    {"kv": ints(0, 4, 9), "indices": torch.arange(9, dtype=torch.int32)},
    {"options": {"q_len_per_req": 2}},
)


def assert_both_refuse(flashinfer: ModuleType, use: Callable[[Any], object]) -> None:
    for module in (flashinfer, fake_flashinfer):
        with pytest.raises(REFUSALS):
            use(module)


@pytest.mark.parametrize("changes", EAGER, ids=lambda changes: "-".join(changes))
def test_flashinfer_fake_refuses_what_the_library_refuses(flashinfer: ModuleType, changes: dict[str, Any]) -> None:
    assert_both_refuse(flashinfer, lambda module: prefill(replace(Step(), **changes), module))
    assert_both_refuse(flashinfer, lambda module: decode(replace(Step(), **changes), module))


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("changes", GRAPH, ids=lambda changes: "-".join(changes))
def test_flashinfer_fake_refuses_in_graphs_what_the_library_refuses(
    flashinfer: ModuleType, changes: dict[str, Any], fast: bool
) -> None:
    def replan(module: Any) -> None:
        buffers = create_buffers()
        wrapper, step = graph_wrapper(buffers, module=module), buffers.load(Step())
        plan_graph(wrapper, step, module=module)
        plan_graph(wrapper, step, fast=fast, module=module)
        plan_graph(wrapper, replace(step, **changes), fast=fast, module=module)

    assert_both_refuse(flashinfer, replan)


def test_flashinfer_fake_wants_a_plan_before_as_the_library_does(flashinfer: ModuleType) -> None:
    def use(module: Any) -> None:
        buffers = create_buffers()
        plan_graph(graph_wrapper(buffers, module=module), buffers.load(Step()), fast=True, module=module)

    assert_both_refuse(flashinfer, use)


def test_flashinfer_fake_and_library_agree_on_steps_that_are_correct(flashinfer: ModuleType) -> None:
    for compute in (prefill, decode):
        assert torch.equal(compute(Step(), flashinfer), compute(Step()))
