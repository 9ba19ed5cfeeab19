"""The cuda backend over the fake FlashInfer against the reference, op by op and over every shape of batch."""

from __future__ import annotations

import pytest
import torch

from kernels.backend import Activation, NoKernelsError, UnsupportedModelError
from kernels.flashinfer_backend import FlashInferBackend
from kernels.torch_backend import TorchBackend
from tests.kernels.attention_case import AttentionCase, create_case, create_spec, rotary_rows, run_paged
from tests.kernels.flashinfer_machine import create_backend
from tests.kernels.step_builder import build_step, shuffled_tables

REFERENCE = TorchBackend()
TOLERANCE = {torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}, torch.float16: {"rtol": 3e-3, "atol": 3e-3}}
BF16 = torch.bfloat16
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["bf16", "fp16"])
FEW = ((1, 1), (1, 70), (3, 40), (33, 33))
MIXED = ((1, 1), (1, 16), (1, 17), (1, 64), (1, 130), (5, 5), (2, 97), (33, 70), (64, 64), (65, 80))


@pytest.fixture
def backend() -> FlashInferBackend:
    return create_backend()


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, **TOLERANCE[expected.dtype])


def assert_attention_agrees(
    backend: FlashInferBackend, case: AttentionCase, *, page_size: int = 16, seed: int = 0
) -> None:
    expected = run_paged(REFERENCE, case, page_size=page_size, seed=seed)
    assert_close(run_paged(backend, case, page_size=page_size, seed=seed), expected)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 5, 6, 7, 8])
def test_attention_of_every_shape_of_heads(backend: FlashInferBackend, ratio: int, head_dim: int) -> None:
    spec = create_spec(num_kv_heads=2 if ratio < 4 else 1, ratio=ratio, head_dim=head_dim)
    assert_attention_agrees(backend, create_case(spec, FEW, dtype=BF16))


@dtypes
@pytest.mark.parametrize("page_size", [16, 32, 64])
@pytest.mark.parametrize("seed", range(2))
def test_attention_of_mixed_batches_over_shuffled_pages(
    backend: FlashInferBackend, page_size: int, seed: int, dtype: torch.dtype
) -> None:
    case = create_case(create_spec(num_kv_heads=1), MIXED, dtype=dtype, seed=seed)
    assert_attention_agrees(backend, case, page_size=page_size, seed=seed)


@pytest.mark.parametrize(
    "requests",
    [
        ((1, 1),),
        ((1, 200),),
        ((1, 5), (1, 16), (1, 17), (1, 90)),
        ((40, 40),),
        ((40, 90), (7, 7)),
        ((16, 32), (32, 48)),
    ],
    ids=["first", "decode", "decodes", "prefill", "chunks", "page edges"],
)
def test_attention_of_decodes_prefills_and_chunks(backend: FlashInferBackend, requests: tuple[tuple[int, int]]) -> None:
    assert_attention_agrees(backend, create_case(create_spec(), requests, dtype=BF16))


@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
# Around the lengths of FEW and the pages of 16: cuts inside a page, at its edge, and none at all.
@pytest.mark.parametrize("window_left", [-1, 0, 1, 4, 14, 15, 16, 17, 31, 32, 69, 1000])
def test_attention_in_a_window_and_under_a_cap(backend: FlashInferBackend, window_left: int, soft_cap: float) -> None:
    spec = create_spec(window_left=window_left, soft_cap=soft_cap, num_kv_heads=1)
    assert_attention_agrees(backend, create_case(spec, FEW, dtype=BF16))


def test_attention_for_every_q_len_to_70(backend: FlashInferBackend) -> None:
    requests = [(q_len, q_len + 7 * q_len % 40) for q_len in range(1, 71)]
    assert_attention_agrees(backend, create_case(create_spec(num_kv_heads=1, ratio=2), requests, dtype=BF16))


@dtypes
def test_attention_takes_slices_of_one_fused_projection(backend: FlashInferBackend, dtype: torch.dtype) -> None:
    spec = create_spec()
    requests = [(1, 1), (40, 40)]
    meta = build_step(requests, shuffled_tables(requests, page_size=16, num_pages=8, seed=0), page_size=16)
    q, k, v = torch.randn(41, 10, 64).to(dtype).split((6, 2, 2), dim=1)
    outs = []
    for each in (backend, REFERENCE):
        kv = each.alloc_kv([spec], num_pages=8, page_size=16, dtype=dtype)
        outs.append(each.attention(each.plan(meta, kv), 0, q, k, v, kv))
    assert_close(*outs)


@dtypes
@pytest.mark.parametrize("with_bias", [True, False])
def test_linear(backend: FlashInferBackend, with_bias: bool, dtype: torch.dtype) -> None:
    weight = (torch.randn(97, 80) * 80**-0.5).to(dtype)
    bias = torch.randn(97).to(dtype) if with_bias else None
    for num_tokens in (1, 7, 64):
        x = torch.randn(num_tokens, 80).to(dtype)
        expected = REFERENCE.linear(x, REFERENCE.pack_linear(weight, bias))
        assert_close(backend.linear(x, backend.pack_linear(weight, bias)), expected)


@dtypes
@pytest.mark.parametrize("num_tokens", [1, 3, 65])
@pytest.mark.parametrize("is_wide", [False, True], ids=["half weights", "fp32 weights"])
def test_norms(backend: FlashInferBackend, num_tokens: int, is_wide: bool, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, num_tokens, 576).to(dtype)
    weight = torch.randn(576).to(torch.float32 if is_wide else dtype)
    assert_close(backend.rmsnorm(x, weight, 1e-5), REFERENCE.rmsnorm(x, weight, 1e-5))
    other_x, other_residual = x.clone(), residual.clone()
    backend.add_rmsnorm_(x, residual, weight, 1e-5)
    REFERENCE.add_rmsnorm_(other_x, other_residual, weight, 1e-5)
    assert_close(x, other_x)
    assert_close(residual, other_residual)


@pytest.mark.parametrize("num_tokens", [1, 5, 70])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 1, 256), (2, 2, 128)])
@pytest.mark.parametrize("normed", ["neither", "both", "q", "fp32"])
def test_qk_norm_rope(
    backend: FlashInferBackend, normed: str, num_q_heads: int, num_kv_heads: int, head_dim: int, num_tokens: int
) -> None:
    # Slices of one fused projection, as the decoder has them: heads of a token are adjacent, tokens are not.
    fused = torch.randn(num_tokens, num_q_heads + 2 * num_kv_heads, head_dim).to(BF16)
    expected = fused.clone()
    weight_dtype = torch.float32 if normed == "fp32" else BF16
    q_weight = torch.rand(head_dim).to(weight_dtype) + 0.5 if normed != "neither" else None
    k_weight = torch.rand(head_dim).to(weight_dtype) + 0.5 if normed in ("both", "fp32") else None
    cos_sin = rotary_rows(num_tokens, head_dim)
    for each, x in ((backend, fused), (REFERENCE, expected)):
        q, k, _ = x.split((num_q_heads, num_kv_heads, num_kv_heads), dim=1)
        each.qk_norm_rope_(q, k, q_weight, k_weight, cos_sin, 1e-6)
    assert_close(fused, expected)


@dtypes
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_act_mul(backend: FlashInferBackend, num_tokens: int, kind: Activation, dtype: torch.dtype) -> None:
    x = torch.randn(num_tokens, 3072).to(dtype) * 3
    before = x.clone()
    assert_close(backend.act_mul(x, kind), REFERENCE.act_mul(x, kind))
    assert torch.equal(x, before)


def test_rows_are_numbered_where_graphs_find_them(backend: FlashInferBackend) -> None:
    """A longer step than ever gets new numbers; those that a graph was captured with stay what they were."""
    first = backend._token_rows(5)
    grown = backend._token_rows(20_000)
    assert first.data_ptr() == backend._row_ids[0].data_ptr() != grown.data_ptr()
    assert torch.equal(grown, torch.arange(20_000, dtype=torch.int32))
    assert first.tolist() == [0, 1, 2, 3, 4]


def test_it_has_no_kernels_for_whole_steps(backend: FlashInferBackend) -> None:
    with pytest.raises(NoKernelsError, match="layer by layer"):
        backend.fuse(None)  # type: ignore[arg-type]  # refused whatever the model


def test_what_it_has_no_kernels_for_is_refused_before_memory_is_taken(backend: FlashInferBackend) -> None:
    for ask in (backend.alloc_kv, backend.kv_page_bytes):
        size = {"num_pages": 1} if ask == backend.alloc_kv else {}
        with pytest.raises(UnsupportedModelError, match="not in float32"):
            ask([create_spec()], page_size=16, dtype=torch.float32, **size)
        with pytest.raises(UnsupportedModelError, match="this model's have 80"):
            ask([create_spec(head_dim=80)], page_size=16, dtype=BF16, **size)
        with pytest.raises(ValueError, match="pages of 16, 32 or 64 tokens, not 48"):
            ask([create_spec()], page_size=48, dtype=BF16, **size)


def test_an_older_card_computes_in_fp16_alone() -> None:
    old = create_backend(capability=(7, 5))
    old.check([create_spec()], torch.float16)
    with pytest.raises(UnsupportedModelError, match=r"compute capability 8\.0"):
        old.check([create_spec()], BF16)


def test_page_bytes_are_known_before_a_pool_is_allocated(backend: FlashInferBackend) -> None:
    specs = [create_spec(), create_spec(head_dim=256, num_kv_heads=1)]
    for page_size in backend.page_sizes:
        kv = backend.alloc_kv(specs, num_pages=2, page_size=page_size, dtype=BF16)
        assert kv.page_bytes == backend.kv_page_bytes(specs, page_size=page_size, dtype=BF16)
        assert kv.page_bytes == 2 * page_size * (2 * 64 + 256) * 2


def test_it_says_what_it_is(backend: FlashInferBackend) -> None:
    assert (backend.name, backend.device, backend.default_dtype, backend.page_sizes[0]) == ("cuda", "cpu", BF16, 16)
