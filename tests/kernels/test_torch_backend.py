"""The reference against computations that share no line with it: dense SDPA, a Python loop, complex numbers."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

from kernels.torch_backend import TorchBackend, create_backend, visible
from tests.kernels.attention_case import MIXED, AttentionCase, create_case, create_spec, rotary_rows, run_paged
from tests.kernels.step_builder import Request

TIGHT = {"rtol": 1e-5, "atol": 2e-6}


@pytest.fixture
def backend() -> TorchBackend:
    return create_backend()


def dense_attention(case: AttentionCase) -> torch.Tensor:
    """Contiguous K and V, an additive mask made pair by pair, torch's own attention in fp64."""
    spec = case.spec
    outs = []
    for i, (q_len, kv_len) in enumerate(case.requests):
        mask = torch.full((q_len, kv_len), -math.inf, dtype=torch.float64)
        for row, position in enumerate(range(kv_len - q_len, kv_len)):
            oldest = 0 if spec.window_left < 0 else max(0, position - spec.window_left)
            mask[row, oldest : position + 1] = 0.0
        q, k, v = (x.double().transpose(0, 1) for x in (case.q[i][kv_len - q_len :], case.k[i], case.v[i]))
        out = F.scaled_dot_product_attention(
            q[None], k[None], v[None], attn_mask=mask, scale=spec.sm_scale, enable_gqa=True
        )
        outs.append(out[0].transpose(0, 1).flatten(1))
    return torch.cat(outs).to(case.dtype)


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("window_left", [-1, 0, 1, 17, 400])
def test_attention_equals_dense_attention(backend: TorchBackend, page_size: int, window_left: int) -> None:
    case = create_case(create_spec(window_left=window_left, head_dim=32))
    torch.testing.assert_close(run_paged(backend, case, page_size=page_size), dense_attention(case), **TIGHT)


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_attention_of_every_shape_of_heads(backend: TorchBackend, ratio: int, head_dim: int) -> None:
    case = create_case(create_spec(ratio=ratio, head_dim=head_dim), MIXED[:6])
    torch.testing.assert_close(run_paged(backend, case), dense_attention(case), **TIGHT)


def test_attention_in_bf16_rounds_only_its_output(backend: TorchBackend) -> None:
    case = create_case(create_spec(), dtype=torch.bfloat16)
    torch.testing.assert_close(run_paged(backend, case), dense_attention(case), rtol=2**-7, atol=1e-4)


def test_soft_cap_by_hand(backend: TorchBackend) -> None:
    spec = create_spec(num_kv_heads=1, ratio=1, head_dim=2, soft_cap=1.5)
    case = create_case(spec, [(1, 3)])
    q, keys, values = case.q[0][2, 0], case.k[0][:, 0], case.v[0][:, 0]
    weights = [math.exp(1.5 * math.tanh(float(q @ key) * spec.sm_scale / 1.5)) for key in keys]
    expected = sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)
    torch.testing.assert_close(run_paged(backend, case)[0], expected, **TIGHT)


@pytest.mark.parametrize("alone", range(len(MIXED)))
def test_a_request_does_not_depend_on_who_shares_the_batch(backend: TorchBackend, alone: int) -> None:
    case = create_case(create_spec())
    start = sum(q_len for q_len, _ in MIXED[:alone])
    q_len = MIXED[alone][0]
    single = AttentionCase(case.spec, (MIXED[alone],), case.dtype, [case.q[alone]], [case.k[alone]], [case.v[alone]])
    together = run_paged(backend, case)[start : start + q_len]
    assert torch.equal(run_paged(backend, single, seed=5), together)


@pytest.mark.parametrize("chunks", [[(7, 7), (30, 37), (63, 100)], [(1, 1), (98, 99), (1, 100)], [(100, 100)]])
def test_chunks_of_a_prompt_give_the_whole_prompts_rows(backend: TorchBackend, chunks: list[Request]) -> None:
    whole = create_case(create_spec(window_left=40), [(100, 100)])
    expected = dense_attention(whole)
    for q_len, kv_len in chunks:
        sequences = [[x[0][:kv_len]] for x in (whole.q, whole.k, whole.v)]
        out = run_paged(backend, AttentionCase(whole.spec, ((q_len, kv_len),), whole.dtype, *sequences))
        torch.testing.assert_close(out, expected[kv_len - q_len : kv_len], **TIGHT)


@pytest.mark.parametrize("window_left", [-1, 40])
def test_a_tokens_bits_do_not_depend_on_its_chunk(backend: TorchBackend, window_left: int) -> None:
    whole = create_case(create_spec(window_left=window_left), [(100, 100)])
    expected = run_paged(backend, whole)
    for q_len, kv_len in [(1, 1), (1, 100), (7, 50), (63, 100)]:
        sequences = [[x[0][:kv_len]] for x in (whole.q, whole.k, whole.v)]
        out = run_paged(backend, AttentionCase(whole.spec, ((q_len, kv_len),), whole.dtype, *sequences))
        assert torch.equal(out, expected[kv_len - q_len : kv_len])


@pytest.mark.parametrize(("num_in", "num_out"), [(576, 960), (1536, 576), (64, 5000)])
def test_a_rows_bits_do_not_depend_on_the_number_of_rows(backend: TorchBackend, num_in: int, num_out: int) -> None:
    generator = torch.Generator().manual_seed(num_in)
    x = torch.randn(200, num_in, generator=generator)
    packed = backend.pack_linear(torch.randn(num_out, num_in, generator=generator), None)
    expected = backend.linear(x, packed)
    for start, num_rows in [(0, 1), (7, 1), (3, 2), (0, 3), (9, 5), (1, 11), (5, 16), (0, 33), (60, 129)]:
        assert torch.equal(backend.linear(x[start : start + num_rows], packed), expected[start : start + num_rows])


def test_visible_draws_the_docstrings_picture() -> None:
    def draw(window_left: int) -> list[str]:
        return ["".join(".x"[int(cell)] for cell in row) for row in visible(3, 5, window_left)]

    assert draw(-1) == ["xxx..", "xxxx.", "xxxxx"]
    assert draw(1) == [".xx..", "..xx.", "...xx"]


def test_rmsnorm_row_by_row(backend: TorchBackend) -> None:
    x, weight = torch.randn(5, 24), torch.randn(24)
    out = backend.rmsnorm(x, weight, 1e-3)
    for row, normed in zip(x.tolist(), out.tolist(), strict=True):
        rms = math.sqrt(sum(value * value for value in row) / 24 + 1e-3)
        expected = [value / rms * scale for value, scale in zip(row, weight.tolist(), strict=True)]
        assert normed == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_add_rmsnorm_updates_both_in_place(backend: TorchBackend) -> None:
    x, residual, weight = torch.randn(3, 16), torch.randn(3, 16), torch.randn(16)
    total = x + residual
    backend.add_rmsnorm_(x, residual, weight, 1e-6)
    assert torch.equal(residual, total)
    assert torch.equal(x, backend.rmsnorm(total, weight, 1e-6))


@pytest.mark.parametrize("with_norm", [False, True])
def test_rope_is_a_turn_in_the_complex_plane(backend: TorchBackend, with_norm: bool) -> None:
    cos_sin = rotary_rows(6, 16)
    q, k = torch.randn(6, 4, 16), torch.randn(6, 2, 16)
    q_weight, k_weight = (torch.randn(16), torch.randn(16)) if with_norm else (None, None)

    def turned(x: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
        if weight is not None:
            x = F.rms_norm(x, (16,), weight, 1e-6)
        turn = torch.complex(cos_sin[:, :8], cos_sin[:, 8:]).unsqueeze(1)
        rotated = torch.complex(x[..., :8], x[..., 8:]) * turn
        return torch.cat((rotated.real, rotated.imag), dim=-1)

    expected_q, expected_k = turned(q, q_weight), turned(k, k_weight)
    backend.qk_norm_rope_(q, k, q_weight, k_weight, cos_sin, 1e-6)
    torch.testing.assert_close(q, expected_q, **TIGHT)
    torch.testing.assert_close(k, expected_k, **TIGHT)


def test_linear_by_hand(backend: TorchBackend) -> None:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    weight, bias = torch.tensor([[1.0, 0.0], [1.0, 1.0], [0.0, -1.0]]), torch.tensor([10.0, 20.0, 30.0])
    assert backend.linear(x, backend.pack_linear(weight, bias)).tolist() == [[11.0, 23.0, 28.0], [13.0, 27.0, 26.0]]
    assert backend.linear(x, backend.pack_linear(weight, None)).tolist() == [[1.0, 3.0, -2.0], [3.0, 7.0, -4.0]]


def test_act_mul_by_hand(backend: TorchBackend) -> None:
    gates, ups = [-2.0, 0.0, 0.5, 3.0], [1.0, 5.0, -2.0, 0.5]
    x = torch.tensor([gates + ups])
    silu = [gate / (1 + math.exp(-gate)) * up for gate, up in zip(gates, ups, strict=True)]
    gelu = [
        0.5 * gate * (1 + math.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
        for gate, up in zip(gates, ups, strict=True)
    ]
    assert backend.act_mul(x, "silu")[0].tolist() == pytest.approx(silu, rel=1e-5)
    assert backend.act_mul(x, "gelu_tanh")[0].tolist() == pytest.approx(gelu, rel=1e-5)
