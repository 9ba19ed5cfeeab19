"""The fake FlashInfer has the real one's signatures, and every call of the backend binds to them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

import kernels
from kernels.flashinfer_backend import FlashInferBackend
from kernels.flashinfer_support import why_no_kernels
from kernels.testing import fake_flashinfer
from kernels.testing.fake_flashinfer import Call
from tests.kernels.attention_case import create_case, create_spec, rotary_rows, run_paged
from tests.kernels.decoding_case import DecodingCase, attend_layers
from tests.kernels.flashinfer_machine import create_backend
from tests.kernels.graph_step import GraphStep
from tests.kernels.real_flashinfer import import_flashinfer

ROOT = Path(kernels.__file__).parents[1]
DECODE = "BatchDecodeWithPagedKVCacheWrapper"
NAMES = [
    *(function.__name__ for function in fake_flashinfer.FUNCTIONS),
    *(f"{wrapper.__name__}.{method}" for wrapper in fake_flashinfer.WRAPPERS for method in fake_flashinfer.METHODS),
    f"{DECODE}._plan_impl",  # takes what plan() calls **kwargs
]


@pytest.fixture(scope="module")
def flashinfer() -> ModuleType:
    return import_flashinfer()


def find(module: Any, name: str) -> inspect.Signature:
    for part in name.split("."):
        module = getattr(module, part)
    return inspect.signature(module)


def parameters(signature: inspect.Signature) -> list[tuple[str, Any, Any]]:
    return [(name, parameter.kind, parameter.default) for name, parameter in signature.parameters.items()]


def test_flashinfer_version_is_the_one_that_is_pinned(flashinfer: ModuleType) -> None:
    assert flashinfer.__version__ == fake_flashinfer.__version__
    pin = f"flashinfer-python=={fake_flashinfer.__version__}"
    assert pin in (ROOT / "requirements-flashinfer.lock").read_text(encoding="utf-8").splitlines()
    assert f'cuda = ["{pin}"]' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_flashinfer_fake_has_the_signature(flashinfer: ModuleType, name: str) -> None:
    assert parameters(find(fake_flashinfer, name)) == parameters(find(flashinfer, name))


def test_flashinfer_fast_plan_is_where_the_fake_has_it(flashinfer: ModuleType) -> None:
    assert flashinfer.fast_decode_plan is flashinfer.decode.fast_decode_plan


# ---------------------------------------------------------------------- the backend's calls


def decode_in_a_graph(backend: FlashInferBackend, case: DecodingCase, size: int, *, shared_room: int = 0) -> None:
    memory = GraphStep(size, page_size=16, room=size * 32, shared_room=shared_room)
    for _ in range(3):
        meta, heads, _ = case.next_step()
        tensors = memory.fill(meta, case.num_shared_pages if shared_room else 0)
        plan = backend.plan_step(tensors, case.kv, in_graph=True)
        padded = [tuple(torch.cat((x, x.new_zeros(size - len(x), *x.shape[1:]))) for x in layer) for layer in heads]
        for layer, (q, k, v) in enumerate(padded):
            backend.attention(plan, layer, q, k, v, case.kv)


@torch.inference_mode()
def exercise(backend: FlashInferBackend) -> list[Call]:
    """Everything that the backend calls of the library, over kinds of attention, steps and dtypes."""
    kinds = [create_spec(window_left=window, soft_cap=cap) for window in (-1, 20) for cap in (0.0, 3.0)]
    for kind in kinds:
        for dtype in (torch.bfloat16, torch.float16):
            run_paged(backend, create_case(kind, ((1, 5), (1, 70), (33, 40), (65, 65)), dtype=dtype), page_size=16)
    decode_in_a_graph(backend, DecodingCase(backend, kinds, (1, 15, 50)), 4)
    long = DecodingCase(backend, kinds[:2], (257, 258, 272, 273, 288, 300, 320, 257), num_shared_pages=16)
    decode_in_a_graph(backend, long, 8, shared_room=16)
    meta, heads, _ = long.next_step()
    attend_layers(backend, meta, heads, long.kv)
    for width in (torch.bfloat16, torch.float32):
        x, weight = torch.randn(3, 64).bfloat16(), 1 + torch.randn(64).bfloat16().to(width)  # in fp32: Gemma's
        backend.rmsnorm(x, weight, 1e-6)
        backend.add_rmsnorm_(x, x.clone(), weight, 1e-6)
        q, k = torch.randn(3, 3, 64).bfloat16().split((2, 1), dim=1)
        backend.qk_norm_rope_(q, k, weight, weight, rotary_rows(3, 64), 1e-6)
    for kind in ("silu", "gelu_tanh"):
        backend.act_mul(torch.randn(3, 64).bfloat16(), kind)  # type: ignore[arg-type]
    calls: list[Call] = backend._flashinfer.calls
    return calls


@pytest.fixture(scope="module")
def calls() -> list[Call]:
    return exercise(create_backend())


def test_flashinfer_binds_every_call_of_the_backend(flashinfer: ModuleType, calls: list[Call]) -> None:
    distinct = {(call.name, len(call.args), tuple(call.kwargs)): call for call in calls}
    for call in distinct.values():
        own = (None,) if "." in call.name else ()  # self
        find(flashinfer, call.name).bind(*own, *call.args, **call.kwargs)
        if call.name == f"{DECODE}.plan":
            find(flashinfer, f"{DECODE}._plan_impl").bind(*own, *call.args, **call.kwargs)


def test_flashinfer_call_that_does_not_bind_is_seen(flashinfer: ModuleType) -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'epsilon'"):
        find(flashinfer, "rmsnorm").bind(None, None, epsilon=1e-6)
    with pytest.raises(TypeError, match="unexpected keyword argument 'window'"):
        find(flashinfer, f"{DECODE}._plan_impl").bind(*[None] * 8, window=1)


def names_in_sources() -> Iterable[str]:
    for path in sorted((ROOT / "kernels").glob("flashinfer_*.py")):
        yield from re.findall(
            r"\b(?:self\._flashinfer|self\._library|library)\.(\w+)", path.read_text(encoding="utf-8")
        )


def test_flashinfer_every_call_site_has_been_exercised(calls: list[Call]) -> None:
    in_sources = set(names_in_sources())
    assert in_sources == {call.name.split(".")[0] for call in calls}
    assert DECODE in in_sources


def test_what_a_missing_module_is_told_by_is_known(flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    error = flashinfer.jit.core.MissingJITCacheError("not found in the JIT cache", spec=SimpleNamespace(name="rope"))
    assert "the module rope is not compiled" in why_no_kernels(error)
    assert why_no_kernels(RuntimeError("CUDA error: an illegal memory access")) == ""
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(flashinfer.jit.cpp_ext.os.path, "exists", lambda path: False)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    with pytest.raises(RuntimeError) as caught:
        flashinfer.jit.cpp_ext.get_cuda_path.__wrapped__()
    assert "compiling it now fails: Could not find nvcc" in why_no_kernels(caught.value)


def test_what_a_failed_compilation_is_told_by_is_known(
    flashinfer: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(status: int | None) -> BaseException:
        if status is not None:
            (tmp_path / "ninja").write_text(f"#!/bin/sh\necho nvcc fatal\nexit {status}\n")
            (tmp_path / "ninja").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises((RuntimeError, OSError)) as caught:
            flashinfer.jit.cpp_ext.run_ninja(tmp_path, tmp_path / "build.ninja", verbose=False)
        return caught.value

    assert "compiling it now fails: [Errno 2]" in why_no_kernels(run(None))
    assert "compiling it now fails: Ninja build failed." in why_no_kernels(run(1))
