"""The CPU backend without its kernels, packed and not, against the reference, op by op."""

from __future__ import annotations

import pytest
import torch

from kernels.backend import Activation, AttnSpec
from kernels.cpu_fallback import CpuFallback, supported_dtypes
from kernels.torch_backend import TorchBackend
from tests.kernels.attention_case import AttentionCase, create_case, create_spec, rotary_rows, run_paged
from tests.kernels.step_builder import build_step, shuffled_tables

TOLERANCE = {torch.float32: {"rtol": 1e-5, "atol": 5e-6}, torch.bfloat16: {"rtol": 2e-2, "atol": 2e-2}}
REFERENCE = TorchBackend()
FEW = ((1, 1), (1, 70), (3, 40), (33, 33))
dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=["fp32", "bf16"])


@pytest.fixture
def backend() -> CpuFallback:
    return CpuFallback(prepacked_dtypes=supported_dtypes())


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual, expected, **TOLERANCE[expected.dtype])


def assert_attention_agrees(backend: CpuFallback, case: AttentionCase, *, page_size: int = 32, seed: int = 0) -> None:
    expected = run_paged(REFERENCE, case, page_size=page_size, seed=seed)
    assert_close(run_paged(backend, case, page_size=page_size, seed=seed), expected)


@dtypes
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 8])
def test_attention_of_every_shape_of_heads(backend: CpuFallback, ratio: int, head_dim: int, dtype: torch.dtype) -> None:
    spec = create_spec(num_kv_heads=2 if ratio < 4 else 1, ratio=ratio, head_dim=head_dim)
    assert_attention_agrees(backend, create_case(spec, FEW, dtype=dtype))


@dtypes
@pytest.mark.parametrize("page_size", [32, 64, 128])
@pytest.mark.parametrize("seed", range(3))
def test_attention_over_shuffled_pages(backend: CpuFallback, page_size: int, seed: int, dtype: torch.dtype) -> None:
    case = create_case(create_spec(), dtype=dtype, seed=seed)
    assert_attention_agrees(backend, case, page_size=page_size, seed=seed)


@dtypes
@pytest.mark.parametrize("soft_cap", [0.0, 2.0])
# Around the lengths of MIXED and the pages of 32: cuts inside a page, at its edge, and none at all.
@pytest.mark.parametrize("window_left", [0, 1, 4, 30, 31, 32, 33, 63, 64, 69, 129, 160, 1000])
def test_attention_in_a_window(backend: CpuFallback, window_left: int, soft_cap: float, dtype: torch.dtype) -> None:
    spec = create_spec(window_left=window_left, soft_cap=soft_cap, num_kv_heads=1)
    assert_attention_agrees(backend, create_case(spec, dtype=dtype))


@dtypes
def test_attention_on_two_threads(backend: CpuFallback, two_threads: None, dtype: torch.dtype) -> None:
    assert_attention_agrees(backend, create_case(create_spec(), dtype=dtype))


@dtypes
def test_attention_with_a_soft_cap(backend: CpuFallback, dtype: torch.dtype) -> None:
    assert_attention_agrees(backend, create_case(create_spec(soft_cap=2.0), dtype=dtype))


@dtypes
def test_attention_for_every_q_len_to_130(backend: CpuFallback, dtype: torch.dtype) -> None:
    requests = [(q_len, q_len + 7 * q_len % 40) for q_len in range(1, 131)]
    case = create_case(create_spec(num_kv_heads=1, ratio=2), requests, dtype=dtype)
    assert_attention_agrees(backend, case)


@dtypes
def test_attention_takes_slices_of_one_fused_projection(backend: CpuFallback, dtype: torch.dtype) -> None:
    spec = create_spec()
    requests = [(1, 1), (40, 40)]
    meta = build_step(requests, shuffled_tables(requests, page_size=32, num_pages=4, seed=0), page_size=32)
    q, k, v = torch.randn(41, 10, 64).to(dtype).split((6, 2, 2), dim=1)
    outs = []
    for each in (backend, REFERENCE):
        kv = each.alloc_kv([spec], num_pages=4, page_size=32, dtype=dtype)
        outs.append(each.attention(each.plan(meta, kv), 0, q, k, v, kv))
    assert_close(*outs)


@dtypes
def test_layers_of_different_windows_share_a_plan(backend: CpuFallback, dtype: torch.dtype) -> None:
    specs = [create_spec(window_left=window) for window in (8, -1, 40, 8)]
    requests = [(1, 100), (20, 60), (50, 50)]
    tables = shuffled_tables(requests, page_size=32, num_pages=12, seed=0)
    prefix = build_step([(99, 99), (40, 40)], tables[:2], page_size=32)
    step = build_step(requests, tables, page_size=32)
    outs: list[list[torch.Tensor]] = []
    for each in (backend, REFERENCE):
        torch.manual_seed(0)
        kv = each.alloc_kv(specs, num_pages=12, page_size=32, dtype=dtype)
        outs.append([])
        for meta in (prefix, step):
            plan = each.plan(meta, kv)
            for layer, spec in enumerate(specs):
                outs[-1].append(each.attention(plan, layer, *random_qkv(spec, meta.num_tokens, dtype), kv))
    for actual, expected in zip(*outs, strict=True):
        assert_close(actual, expected)


def random_qkv(spec: AttnSpec, num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    def random(heads: int) -> torch.Tensor:
        return torch.randn(num_tokens, heads, spec.head_dim).to(dtype)

    return random(spec.num_q_heads), random(spec.num_kv_heads), random(spec.num_kv_heads)


@dtypes
def test_a_request_does_not_depend_on_who_shares_the_batch(backend: CpuFallback, dtype: torch.dtype) -> None:
    case = create_case(create_spec(), dtype=dtype)
    together = run_paged(backend, case)
    start = 0
    for i, (q_len, kv_len) in enumerate(case.requests):
        single = AttentionCase(case.spec, ((q_len, kv_len),), dtype, [case.q[i]], [case.k[i]], [case.v[i]])
        assert_close(run_paged(backend, single, seed=i), together[start : start + q_len])
        start += q_len


@dtypes
@pytest.mark.parametrize("window_left", [-1, 40])
def test_a_row_is_bit_equal_wherever_its_prompt_was_cut(
    backend: CpuFallback, window_left: int, dtype: torch.dtype
) -> None:
    """Chunks and prefix hits move the cut; only a lone last token takes another path."""
    case = create_case(create_spec(window_left=window_left), [(300, 300)], dtype=dtype)
    whole = run_paged(backend, case)
    for q_len in (2, 7, 33, 100, 255):
        cut = AttentionCase(case.spec, ((q_len, 300),), dtype, case.q, case.k, case.v)
        assert torch.equal(run_paged(backend, cut, seed=q_len), whole[-q_len:]), q_len


@pytest.mark.parametrize("page_size", [1, 16, 48])
def test_a_page_size_it_does_not_have_is_refused(backend: CpuFallback, page_size: int) -> None:
    with pytest.raises(ValueError, match=f"pages of 32, 64 or 128 tokens, not {page_size}"):
        backend.alloc_kv([create_spec()], num_pages=1, page_size=page_size, dtype=torch.float32)


@dtypes
@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize(("num_out", "num_in"), [(576, 576), (97, 80), (64, 1536)])
def test_linear(num_out: int, num_in: int, with_bias: bool, packs: bool, dtype: torch.dtype) -> None:
    backend = CpuFallback(prepacked_dtypes=supported_dtypes()) if packs else CpuFallback(prepacked_dtypes=())
    weight = (torch.randn(num_out, num_in) * num_in**-0.5).to(dtype)
    bias = torch.randn(num_out).to(dtype) if with_bias else None
    packed = backend.pack_linear(weight, bias)
    assert packed.prepacked == (packs and dtype in supported_dtypes())
    for num_tokens in (1, 2, 7, 64, 130):
        x = torch.randn(num_tokens, num_in).to(dtype)
        assert_close(backend.linear(x, packed), REFERENCE.linear(x, REFERENCE.pack_linear(weight, bias)))


@dtypes
@pytest.mark.parametrize(("num_out", "num_in"), [(960, 576), (576, 1536), (96, 3072)])
def test_a_row_of_linear_is_bit_equal_in_any_batch(
    backend: CpuFallback, two_threads: None, num_out: int, num_in: int, dtype: torch.dtype
) -> None:
    """Where it was measured: AVX512 with bf16, without AMX. oneDNN promises it nowhere; elsewhere rows are close.

    Two threads, because a sum may be split over them.
    """
    is_measured = torch.cpu._is_avx512_bf16_supported() and not torch.cpu._is_amx_tile_supported()
    weight = (torch.randn(num_out, num_in) * num_in**-0.5).to(dtype)
    packed = backend.pack_linear(weight, None)
    x = torch.randn(64, num_in).to(dtype)
    alone = torch.cat([backend.linear(row, packed) for row in x.split(1)])
    for num_tokens in (2, 3, 8, 15, 16, 17, 32, 33, 64):
        together = backend.linear(x[:num_tokens], packed)
        if is_measured:
            assert torch.equal(together, alone[:num_tokens])
        else:
            assert_close(together, alone[:num_tokens])


@dtypes
@pytest.mark.parametrize("num_tokens", [1, 3, 65])
def test_norms(backend: CpuFallback, num_tokens: int, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, num_tokens, 576).to(dtype)
    weight = torch.randn(576).to(dtype)
    assert_close(backend.rmsnorm(x, weight, 1e-5), REFERENCE.rmsnorm(x, weight, 1e-5))
    other_x, other_residual = x.clone(), residual.clone()
    backend.add_rmsnorm_(x, residual, weight, 1e-5)
    REFERENCE.add_rmsnorm_(other_x, other_residual, weight, 1e-5)
    assert_close(x, other_x)
    assert_close(residual, other_residual)


@dtypes
@pytest.mark.parametrize("num_tokens", [1, 5, 70])
@pytest.mark.parametrize(("num_q_heads", "num_kv_heads", "head_dim"), [(9, 3, 64), (4, 1, 256), (2, 2, 80)])
@pytest.mark.parametrize("normed", ["neither", "both", "q"])
def test_qk_norm_rope(
    backend: CpuFallback,
    normed: str,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    num_tokens: int,
    dtype: torch.dtype,
) -> None:
    # Slices of one fused projection, as the decoder has them: heads of a token are adjacent, tokens are not.
    fused = torch.randn(num_tokens, num_q_heads + 2 * num_kv_heads, head_dim).to(dtype)
    expected = fused.clone()
    q_weight = torch.rand(head_dim).to(dtype) + 0.5 if normed != "neither" else None
    k_weight = torch.rand(head_dim).to(dtype) + 0.5 if normed == "both" else None
    cos_sin = rotary_rows(num_tokens, head_dim)
    for each, x in ((backend, fused), (REFERENCE, expected)):
        q, k, _ = x.split((num_q_heads, num_kv_heads, num_kv_heads), dim=1)
        each.qk_norm_rope_(q, k, q_weight, k_weight, cos_sin, 1e-6)
    assert_close(fused, expected)


@dtypes
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("num_tokens", [1, 33])
def test_act_mul(backend: CpuFallback, num_tokens: int, kind: Activation, dtype: torch.dtype) -> None:
    x = torch.randn(num_tokens, 3072).to(dtype) * 3
    before = x.clone()
    assert_close(backend.act_mul(x, kind), REFERENCE.act_mul(x, kind))
    assert torch.equal(x, before)


def test_default_dtype_is_bf16_where_linears_run_in_it() -> None:
    both = CpuFallback(prepacked_dtypes=(torch.float32, torch.bfloat16))
    assert both.default_dtype == torch.bfloat16
    assert CpuFallback(prepacked_dtypes=(torch.float32,)).default_dtype == torch.float32
    assert CpuFallback(prepacked_dtypes=()).default_dtype == torch.float32
