"""The fake FlashInfer against the reference functions in plain torch that the real one comes with: a second oracle."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch

from kernels.testing import fake_flashinfer as fake
from tests.kernels.real_flashinfer import import_flashinfer
from tests.kernels.testing.flashinfer_case import WORKSPACE, ints, random

TOLERANCE = {"rtol": 1.6e-2, "atol": 1e-2}  # two roundings to bf16
SHAPES = [(4, 2, 64, 4), (3, 3, 128, 16), (8, 1, 64, 32), (5, 1, 256, 16)]  # heads, KV heads, head_dim, page_size
shapes = pytest.mark.parametrize(("heads", "kv_heads", "head_dim", "page_size"), SHAPES)


class References:
    """The functions by their names."""

    def __init__(self) -> None:
        import_flashinfer()

    def __getattr__(self, name: str) -> ModuleType:
        return importlib.import_module(f"flashinfer.trace.templates.{name}")


@pytest.fixture(scope="module")
def references() -> Any:
    return References()


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.float(), expected.float(), **TOLERANCE)


def full_pages(page_size: int, kv_heads: int, head_dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Three requests; the references know no last_page_len: all pages are full."""
    return random(9, 2, page_size, kv_heads, head_dim, seed=5), ints(0, 1, 3, 7), ints(8, 0, 3, 5, 2, 7, 1)


@shapes
def test_flashinfer_reference_of_decode(
    references: Any, heads: int, kv_heads: int, head_dim: int, page_size: int
) -> None:
    pool, indptr, indices = full_pages(page_size, kv_heads, head_dim)
    q = random(3, heads, head_dim)
    wrapper = fake.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, use_tensor_cores=True)
    last = torch.full((3,), page_size, dtype=torch.int32)
    options = {"q_data_type": torch.bfloat16, "sm_scale": 0.11}
    wrapper.plan(indptr, indices, last, heads, kv_heads, head_dim, page_size, **options)
    out, lse = wrapper.run(q, pool, return_lse=True)
    reference = references.attention._gqa_paged_decode_reference
    expected, expected_lse = reference(q, pool[:, 0], pool[:, 1], indptr, indices, 0.11)
    close(out, expected)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)


@shapes
@pytest.mark.parametrize("q_lens", [(1, 1, 1), (4, 3, 2), (2, 1, 4)])
def test_flashinfer_reference_of_prefill(
    references: Any, heads: int, kv_heads: int, head_dim: int, page_size: int, q_lens: tuple[int, int, int]
) -> None:
    pool, indptr, indices = full_pages(page_size, kv_heads, head_dim)
    q, last = random(sum(q_lens), heads, head_dim), torch.full((3,), page_size, dtype=torch.int32)
    qo = ints(0, q_lens[0], q_lens[0] + q_lens[1], sum(q_lens))
    wrapper = fake.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE)
    shape = (heads, kv_heads, head_dim, page_size)
    wrapper.plan(qo, indptr, indices, last, *shape, causal=True, q_data_type=torch.bfloat16)
    out, lse = wrapper.run(q, pool, return_lse=True)
    reference = references.attention._gqa_paged_prefill_reference
    expected, expected_lse = reference(q, pool[:, 0], pool[:, 1], qo, indptr, indices, head_dim**-0.5)
    close(out, expected)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)


def test_flashinfer_reference_of_append(references: Any) -> None:
    k, v = random(5, 2, 64), random(5, 2, 64, seed=1)
    where = (ints(0, 0, 2, 2, 1), ints(2, 3, 14, 15, 7))
    pool, indptr, indices = full_pages(4, 2, 64)
    made, expected = pool.clone(), pool.clone()
    fake.append_paged_kv_cache(k, v, *where, made, indices, indptr, ints(4, 4, 4))
    references.page._append_paged_kv_cache_reference(k, v, *where, expected, indices, indptr, ints(4, 4, 4))
    assert torch.equal(made, expected)
    assert not torch.equal(made, pool)


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [64, 32])
def test_flashinfer_reference_of_rope(references: Any, rotary_dim: int, is_neox: bool) -> None:
    q, k, positions = random(4, 3 * 64), random(4, 64, seed=1), ints(0, 9, 3, 31)
    angles = torch.rand(32, rotary_dim // 2) * 6
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    reference = references.rope._apply_rope_with_cos_sin_cache_reference
    expected_q, expected_k = reference(positions, q, k, 64, table, is_neox)
    fake.apply_rope_with_cos_sin_cache_inplace(positions, q, k, 64, table, is_neox)
    close(q, expected_q)
    close(k, expected_k)


@pytest.mark.parametrize("name", ["rmsnorm", "gemma_rmsnorm"])
def test_flashinfer_reference_of_norms(references: Any, name: str) -> None:
    x, weight = random(5, 96), random(96, seed=1)
    close(getattr(fake, name)(x, weight), getattr(references.norm, f"_{name}_reference")(x, weight))


@pytest.mark.parametrize("name", ["fused_add_rmsnorm", "gemma_fused_add_rmsnorm"])
def test_flashinfer_reference_of_add_norms(references: Any, name: str) -> None:
    x, residual, weight = random(5, 96), random(5, 96, seed=1), random(96, seed=2)
    expected = getattr(references.norm, f"_{name}_reference")(x, residual, weight)
    getattr(fake, name)(x, residual, weight)
    close(x, expected)


@pytest.mark.parametrize("name", ["silu_and_mul", "gelu_tanh_and_mul"])
def test_flashinfer_reference_of_gates(references: Any, name: str) -> None:
    x = random(5, 96)
    expected = getattr(references.activation, f"_{name}_reference")(x.float())
    close(getattr(fake, name)(x), expected)


def test_flashinfer_reference_of_merges(references: Any) -> None:
    v_a, v_b = random(6, 3, 64), random(6, 3, 64, seed=1)
    s_a, s_b = torch.randn(6, 3) * 4, torch.randn(6, 3) * 4
    v, s = fake.merge_state(v_a, s_a, v_b, s_b)
    expected_v, expected_s = references.cascade._merge_state_reference(v_a, s_a, v_b, s_b)
    close(v, expected_v)
    torch.testing.assert_close(s, expected_s)
    fake.merge_state_in_place(v_a, s_a, v_b, s_b)
    assert torch.equal(v_a, v)
    assert torch.equal(s_a, s)


def test_flashinfer_reference_of_probabilities(references: Any) -> None:
    logits = torch.randn(4, 50)
    temperature, top_p = torch.tensor([0.3, 1.0, 2.0, 0.7]), torch.tensor([0.1, 0.5, 0.9, 1.0])
    probs = fake.softmax(logits, temperature)
    sampling = references.sampling
    torch.testing.assert_close(probs, sampling._softmax_reference(logits, temperature))
    torch.testing.assert_close(fake.top_k_renorm_probs(probs, 7), sampling._top_k_renorm_probs_reference(probs, 7))
    torch.testing.assert_close(fake.top_k_mask_logits(logits, 7), sampling._top_k_mask_logits_reference(logits, 7))
    expected = sampling._top_p_renorm_probs_reference(probs, top_p)
    torch.testing.assert_close(fake.top_p_renorm_probs(probs, top_p), expected)
