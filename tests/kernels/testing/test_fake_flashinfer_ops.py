"""The fake FlashInfer's kernels outside of attention, and each of their checks, seen to fail."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from kernels.testing import fake_flashinfer as flashinfer
from kernels.testing.fake_cuda import FakeAccelerator
from kernels.testing.fake_flashinfer import MisuseError
from tests.kernels.testing.flashinfer_case import HEAD_DIM, KV_HEADS, NUM_PAGES, PAGE_SIZE, ints, pool, random

Args = dict[str, Any]
T, H = 3, 64
INF = math.inf
TOLERANCE = {"rtol": 1e-2, "atol": 1e-2}


def append_args() -> Args:
    return {
        "append_key": random(T, KV_HEADS, HEAD_DIM, seed=2),
        "append_value": random(T, KV_HEADS, HEAD_DIM, seed=3),
        "batch_indices": ints(0, 0, 1),
        "positions": ints(3, 4, 0),
        "paged_kv_cache": pool(),
        "kv_indices": ints(3, 4, 7),
        "kv_indptr": ints(0, 2, 3),
        "kv_last_page_len": ints(2, 1),
    }


def rope_args() -> Args:
    table = torch.rand(16, HEAD_DIM)
    return {
        "positions": ints(0, 5, 15),
        "query": random(T, 2 * HEAD_DIM),
        "key": random(T, HEAD_DIM),
        "head_size": HEAD_DIM,
        "cos_sin_cache": table,
    }


def norm_args() -> Args:
    return {"input": random(T, H), "weight": random(H)}


def add_norm_args() -> Args:
    return {"input": random(T, H), "residual": random(T, H, seed=1), "weight": random(H)}


def gate_args() -> Args:
    return {"input": random(T, 2 * H)}


def merge_args() -> Args:
    v, s = random(T, 2, H), torch.zeros(T, 2)
    return {"v_a": v, "s_a": s, "v_b": v.clone(), "s_b": s.clone()}


def merge_in_place_args() -> Args:
    v, s = random(T, 2, H), torch.zeros(T, 2)
    return {"v": v, "s": s, "v_other": v.clone(), "s_other": s.clone()}


def probs_args() -> Args:
    return {"probs": torch.full((T, 8), 0.125)}


def logits_args() -> Args:
    return {"logits": torch.randn(T, 8)}


def wide(dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return random(T, 2 * H, dtype=dtype)


SHARED = random(T, 4 * H)
NAN_ROW = torch.full((T, 8), math.nan)
Case = tuple[str, Callable[[], Args], Args, str]

# (function, correct arguments, what is broken, the message)
REFUSED: tuple[Case, ...] = (
    ("append_paged_kv_cache", append_args, {"kv_layout": "HND"}, "built for NHD"),
    ("append_paged_kv_cache", append_args, {"append_value": random(T, KV_HEADS, 32)}, "K and V must be"),
    ("append_paged_kv_cache", append_args, {"append_value": random(T, KV_HEADS, HEAD_DIM).half()}, "differ in dtype"),
    ("append_paged_kv_cache", append_args, {"append_key": random(T, HEAD_DIM, KV_HEADS).mT}, "contiguous at its last"),
    ("append_paged_kv_cache", append_args, {"paged_kv_cache": pool().half()}, "is torch.float16, planned"),
    ("append_paged_kv_cache", append_args, {"paged_kv_cache": pool().float()}, "no kernels"),
    ("append_paged_kv_cache", append_args, {"paged_kv_cache": pool()[:, 0]}, "must be 5-D"),
    ("append_paged_kv_cache", append_args, {"paged_kv_cache": pool()[..., :32].contiguous()}, "planned .*64"),
    ("append_paged_kv_cache", append_args, {"batch_indices": ints(0, 0, 1).long()}, "batch_indices must be int32"),
    ("append_paged_kv_cache", append_args, {"positions": ints(3, 4)}, "positions has 2 entries for 3 tokens"),
    ("append_paged_kv_cache", append_args, {"positions": ints(3, 6, 0)}, "position 6 is outside of request 0's 6"),
    ("append_paged_kv_cache", append_args, {"positions": ints(3, -1, 0)}, "position -1 is outside"),
    ("append_paged_kv_cache", append_args, {"positions": ints(3, 3, 0)}, "two tokens at slot 3 of page 3"),
    ("append_paged_kv_cache", append_args, {"batch_indices": ints(0, 0, 2)}, "names request 2 of 2"),
    ("append_paged_kv_cache", append_args, {"kv_indptr": ints(0, 2)}, "disagree on B"),
    ("append_paged_kv_cache", append_args, {"kv_indices": ints(3, 4)}, "page 2 of kv_indices, which has 2"),
    ("append_paged_kv_cache", append_args, {"kv_indices": ints(3, NUM_PAGES, 7)}, "outside of the pool's 20"),
    (
        "append_paged_kv_cache",
        append_args,
        {"append_key": random(T, KV_HEADS, 80), "append_value": random(T, KV_HEADS, 80)},
        "head_dim 80 is not in",
    ),
    ("apply_rope_with_cos_sin_cache_inplace", rope_args, {"cos_sin_cache": torch.rand(16, H).bfloat16()}, "float32"),
    ("apply_rope_with_cos_sin_cache_inplace", rope_args, {"cos_sin_cache": torch.rand(16, 2 * H)[:, ::2]}, "must be"),
    ("apply_rope_with_cos_sin_cache_inplace", rope_args, {"cos_sin_cache": torch.rand(16, 128)}, "rotary_dim 128"),
    ("apply_rope_with_cos_sin_cache_inplace", rope_args, {"cos_sin_cache": torch.rand(16, 24)}, "multiple of 16"),
    ("apply_rope_with_cos_sin_cache_inplace", rope_args, {"positions": torch.zeros(T)}, "int32 or int64"),
    ("apply_rope_with_cos_sin_cache_inplace", rope_args, {"positions": ints(0, 5, 16)}, "outside of cos_sin_cache"),
    ("apply_rope_with_cos_sin_cache_inplace", rope_args, {"positions": ints(0, -1, 5)}, "outside of cos_sin_cache"),
    ("apply_rope_with_cos_sin_cache_inplace", rope_args, {"query": random(T, 2, H)}, "has 3 dimensions"),
    ("apply_rope_with_cos_sin_cache_inplace", rope_args, {"query": random(T + 1, H)}, "4 rows for 3 positions"),
    ("apply_rope_with_cos_sin_cache_inplace", rope_args, {"query": random(T, 96)}, "not heads of 64"),
    ("apply_rope_with_cos_sin_cache_inplace", rope_args, {"query": random(T, H).float()}, "no kernels"),
    ("apply_rope_with_cos_sin_cache_inplace", rope_args, {"key": random(T, H).half()}, "key torch.float16"),
    ("apply_rope_with_cos_sin_cache_inplace", rope_args, {"key": random(T, H + 4)[:, :H]}, "not 16-byte aligned"),
    (
        "apply_rope_with_cos_sin_cache_inplace",
        rope_args,
        {"query": SHARED[:, : 2 * H], "key": SHARED[:, H : 2 * H]},
        "query and key overlap",
    ),
    ("rmsnorm", norm_args, {"input": random(H)}, "2-D or 3-D"),
    ("rmsnorm", norm_args, {"input": random(T, H).float()}, "norm of torch.float32"),
    ("rmsnorm", norm_args, {"input": random(T, 2 * H)[:, ::2]}, "contiguous at its last"),
    ("rmsnorm", norm_args, {"weight": random(H).float()}, "weight is torch.float32"),
    ("rmsnorm", norm_args, {"weight": random(32)}, r"weight is \(32,\)"),
    ("rmsnorm", norm_args, {"weight": random(2 * H)[::2]}, "weight must be contiguous"),
    ("rmsnorm", norm_args, {"out": random(T, 32)}, "out is"),
    ("rmsnorm", norm_args, {"out": random(T, 2 * H)[:, ::2]}, "out must be contiguous"),
    ("rmsnorm", norm_args, {"input": SHARED[:, :H], "out": SHARED[:, 8 : H + 8]}, "out overlaps input"),
    ("gemma_rmsnorm", norm_args, {"input": random(T, 2, H)}, "must be 2-D"),
    ("gemma_rmsnorm", norm_args, {"weight": random(H).float()}, "weight is torch.float32"),
    ("fused_add_rmsnorm", add_norm_args, {"input": random(T, 2, H)}, "must be"),
    ("fused_add_rmsnorm", add_norm_args, {"residual": random(T, H).half()}, "residual is torch.float16"),
    ("fused_add_rmsnorm", add_norm_args, {"residual": random(T, 2 * H)[:, ::2]}, "residual must be contiguous"),
    ("fused_add_rmsnorm", add_norm_args, {"weight": random(H).half()}, "weight is torch.float16"),
    ("fused_add_rmsnorm", add_norm_args, {"input": SHARED[:, :H], "residual": SHARED[:, :H]}, "residual overlap"),
    ("gemma_fused_add_rmsnorm", add_norm_args, {"residual": random(T, H).half()}, "residual is torch.float16"),
    ("silu_and_mul", gate_args, {"input": random(T, 9)}, "last dimension must be even"),
    ("silu_and_mul", gate_args, {"input": wide().float()}, "no kernels"),
    ("silu_and_mul", gate_args, {"input": SHARED[:, : 2 * H]}, "input must be contiguous"),
    ("silu_and_mul", gate_args, {"input": random(T * 2 * H + 1)[1:].unflatten(0, (T, -1))}, "not 16-byte aligned"),
    ("silu_and_mul", gate_args, {"out": random(T, 2 * H)}, "out is"),
    ("silu_and_mul", gate_args, {"input": SHARED.view(-1, 2 * H), "out": SHARED.view(-1, H)[:6]}, "out overlaps"),
    ("gelu_tanh_and_mul", gate_args, {"input": wide().float()}, "no kernels"),
    ("merge_state", merge_args, {"v_a": random(T, H)}, "v must be"),
    ("merge_state", merge_args, {"s_b": torch.zeros(2, T)}, "states of"),
    ("merge_state", merge_args, {"v_b": random(T, H, 2).mT}, "must be contiguous"),
    ("merge_state", merge_args, {"v_b": random(T, 2, H).half()}, "v of torch.bfloat16 and torch.float16"),
    ("merge_state", merge_args, {"s_a": torch.zeros(T, 2).half()}, "s must be float32"),
    ("merge_state", merge_args, {"s_a": torch.full((T, 2), -INF), "s_b": torch.full((T, 2), -INF)}, "sees no key"),
    ("merge_state_in_place", merge_in_place_args, {"mask": torch.ones(T)}, "mask is not modelled"),
    ("merge_state_in_place", merge_in_place_args, {"s": torch.zeros(T, 2).double()}, "s must be float32"),
    ("softmax", logits_args, {"logits": torch.randn(8)}, r"must be contiguous \[B, V\]"),
    ("softmax", logits_args, {"logits": torch.randn(T, 8).half()}, "must be float32"),
    ("softmax", logits_args, {"logits": NAN_ROW}, "NaN among"),
    ("softmax", logits_args, {"temperature": torch.ones(2)}, "for 3 rows"),
    ("softmax", logits_args, {"temperature": torch.ones(T).half()}, "must be a row of torch.float32"),
    ("softmax", logits_args, {"temperature": 0.0}, "temperature must be positive"),
    ("softmax", logits_args, {"logits": torch.full((T, 8), -INF)}, "NaN among"),
    ("top_k_renorm_probs", probs_args, {"top_k": 0}, "top_k must be at least 1"),
    ("top_k_renorm_probs", probs_args, {"top_k": ints(1, 2, 3).long()}, "must be a row of torch.int32"),
    ("top_k_renorm_probs", probs_args, {"top_k": 2, "probs": NAN_ROW}, "NaN among"),
    ("top_k_renorm_probs", probs_args, {"top_k": 2, "probs": torch.ones(8, T).mT}, "must be contiguous"),
    ("top_p_renorm_probs", probs_args, {"top_p": 0.0}, "top_p must be within"),
    ("top_p_renorm_probs", probs_args, {"top_p": torch.ones(T).double()}, "must be a row of torch.float32"),
    ("top_p_renorm_probs", probs_args, {"top_p": 0.5, "probs": NAN_ROW}, "NaN among"),
    ("top_k_mask_logits", logits_args, {"top_k": 2, "logits": NAN_ROW}, "NaN among"),
    ("top_k_mask_logits", logits_args, {"top_k": ints(1, 2)}, "for 3 rows"),
    ("top_k_mask_logits", logits_args, {"top_k": 2, "logits": torch.randn(T, 8).half()}, "must be float32"),
)


@pytest.mark.parametrize(
    ("name", "arguments", "changes", "message"),
    [pytest.param(*case, id=f"{case[0]}-{'-'.join(case[2])}: {case[3]}") for case in REFUSED],
)
def test_flashinfer_refuses(name: str, arguments: Callable[[], Args], changes: Args, message: str) -> None:
    with pytest.raises(MisuseError, match=message):
        getattr(flashinfer, name)(**{**arguments(), **changes})


@pytest.mark.parametrize("same", ["v_other", "s_other"])
def test_flashinfer_merges_no_state_into_itself(same: str) -> None:
    args = merge_in_place_args()
    with pytest.raises(MisuseError, match="the states overlap"):
        flashinfer.merge_state_in_place(**{**args, same: args[same.removesuffix("_other")]})


# ---------------------------------------------------------------------- what they compute


def test_flashinfer_append_writes_each_token_where_its_request_has_it() -> None:
    args = append_args()
    before = args["paged_kv_cache"].clone()
    flashinfer.append_paged_kv_cache(**args)
    slots = [(3, 3), (4, 0), (7, 0)]
    for row, (page, slot) in enumerate(slots):
        assert torch.equal(args["paged_kv_cache"][page, 0, slot], args["append_key"][row])
        assert torch.equal(args["paged_kv_cache"][page, 1, slot], args["append_value"][row])
        args["paged_kv_cache"][page, :, slot] = before[page, :, slot]
    assert torch.equal(args["paged_kv_cache"], before)


def test_flashinfer_padding_may_write_one_slot_of_the_null_page() -> None:
    tables = {"kv_indices": ints(0, 0, 3), "kv_indptr": ints(0, 1, 2, 3), "kv_last_page_len": ints(1, 1, 1)}
    args = {**append_args(), **tables, "batch_indices": ints(0, 1, 2), "positions": ints(0, 0, 0)}
    flashinfer.append_paged_kv_cache(**args)
    assert torch.equal(args["paged_kv_cache"][3, 0, 0], args["append_key"][2])


@pytest.mark.parametrize("is_neox", [True, False])
@pytest.mark.parametrize("rotary_dim", [HEAD_DIM, 32])
def test_flashinfer_rope_turns_each_pair_by_its_angle(is_neox: bool, rotary_dim: int) -> None:
    half = rotary_dim // 2
    angles = torch.rand(16, half) * 6
    both = random(T, 3 * HEAD_DIM)  # columns of one projection
    query, key = both[:, : 2 * HEAD_DIM], both[:, 2 * HEAD_DIM :]
    before = both.float().view(T, 3, HEAD_DIM).clone()
    positions = ints(0, 5, 15)
    table = torch.cat((angles.cos(), angles.sin()), dim=1)
    flashinfer.apply_rope_with_cos_sin_cache_inplace(positions, query, key, HEAD_DIM, table, is_neox)
    for row, head, pair in [(0, 0, 0), (1, 1, 3), (2, 2, half - 1), (1, 2, 5)]:
        first, second = (pair, pair + half) if is_neox else (2 * pair, 2 * pair + 1)
        x = complex(before[row, head, first], before[row, head, second])
        angle = float(angles[int(positions[row]), pair])
        turned = x * complex(math.cos(angle), math.sin(angle))
        now = both.view(T, 3, HEAD_DIM)[row, head]
        assert float(now[first]) == pytest.approx(turned.real, abs=2e-2)
        assert float(now[second]) == pytest.approx(turned.imag, abs=2e-2)
    assert torch.equal(both.view(T, 3, HEAD_DIM)[..., rotary_dim:].float(), before[..., rotary_dim:])


@pytest.mark.parametrize(
    ("name", "bias", "shape"),
    [("rmsnorm", 0.0, (T, H)), ("rmsnorm", 0.0, (T, 2, H)), ("gemma_rmsnorm", 1.0, (T, H))],
)
def test_flashinfer_norms(name: str, bias: float, shape: tuple[int, ...]) -> None:
    x, weight = random(*shape), random(H, seed=1)
    expected = torch.nn.functional.rms_norm(x.float(), (H,), weight.float() + bias, 1e-3)
    norm = getattr(flashinfer, name)
    torch.testing.assert_close(norm(x, weight, 1e-3).float(), expected, **TOLERANCE)
    assert norm(x, weight, 1e-3, out=x) is x
    torch.testing.assert_close(x.float(), expected, **TOLERANCE)


@pytest.mark.parametrize(("name", "bias"), [("fused_add_rmsnorm", 0.0), ("gemma_fused_add_rmsnorm", 1.0)])
def test_flashinfer_add_norms_take_the_sum_before_it_is_rounded(name: str, bias: float) -> None:
    x, residual, weight = random(T, H) * 100, random(T, H, seed=1), random(H, seed=2)
    total = x.float() + residual.float()
    expected = torch.nn.functional.rms_norm(total, (H,), weight.float() + bias, 1e-3)
    getattr(flashinfer, name)(x, residual, weight, 1e-3)
    assert torch.equal(residual, total.bfloat16())
    torch.testing.assert_close(x.float(), expected, **TOLERANCE)


def test_flashinfer_gates() -> None:
    x = wide()
    gate, up = x.float().split(H, dim=1)
    silu = gate / (1 + torch.exp(-gate)) * up
    gelu = 0.5 * gate * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    torch.testing.assert_close(flashinfer.silu_and_mul(x).float(), silu, **TOLERANCE)
    torch.testing.assert_close(flashinfer.gelu_tanh_and_mul(x).float(), gelu, **TOLERANCE)
    out = random(T, H)
    assert flashinfer.silu_and_mul(x, out) is out
    torch.testing.assert_close(out.float(), silu, **TOLERANCE)


def test_flashinfer_merge_of_a_set_without_keys_is_the_other() -> None:
    args = merge_args()
    args["s_b"].fill_(-INF)
    v, s = flashinfer.merge_state(**args)
    assert torch.equal(v, args["v_a"])
    assert torch.equal(s, args["s_a"])


def test_flashinfer_merge_weighs_by_the_sums() -> None:
    ones = torch.ones(1, 1, H).bfloat16()
    v, s = ones.clone(), torch.full((1, 1), 3.0)  # 8 parts of 1
    flashinfer.merge_state_in_place(v, s, ones * 4, torch.zeros(1, 1))  # 1 part of 4
    torch.testing.assert_close(v.float(), torch.full((1, 1, H), 12 / 9), **TOLERANCE)
    assert float(s) == pytest.approx(math.log2(9))


def test_flashinfer_probabilities() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.1, 0.2, 0.3, 0.4]]))
    probs = flashinfer.softmax(logits, torch.tensor([1.0, 0.5]))
    torch.testing.assert_close(probs[0], torch.tensor([0.5, 0.2, 0.2, 0.1]))
    torch.testing.assert_close(probs[1], torch.tensor([1.0, 4.0, 9.0, 16.0]) / 30)
    torch.testing.assert_close(flashinfer.softmax(logits), logits.exp())
    top = flashinfer.top_k_renorm_probs(logits.exp(), ints(1, 3))
    torch.testing.assert_close(top, torch.tensor([[1.0, 0, 0, 0], [0, 2 / 9, 3 / 9, 4 / 9]]))
    masked = flashinfer.top_k_mask_logits(logits, 2)
    assert masked.isinf().tolist() == [[False, False, False, True], [True, True, False, False]]
    nucleus = flashinfer.top_p_renorm_probs(logits.exp(), torch.tensor([0.4, 0.65]))
    torch.testing.assert_close(nucleus, torch.tensor([[1.0, 0, 0, 0], [0, 0, 3 / 7, 4 / 7]]))


def test_flashinfer_checks_what_a_graph_reads_at_replay() -> None:
    args, accelerator = rope_args(), FakeAccelerator()
    graph = accelerator.capture(lambda: flashinfer.apply_rope_with_cos_sin_cache_inplace(**args))
    graph.replay()
    args["positions"][0] = 16
    with pytest.raises(MisuseError, match="outside of cos_sin_cache"):
        graph.replay()


def test_flashinfer_pages_of_any_size_take_appended_tokens() -> None:
    args = append_args()
    args["paged_kv_cache"] = random(NUM_PAGES, 2, 2 * PAGE_SIZE, KV_HEADS, HEAD_DIM)
    flashinfer.append_paged_kv_cache(**args)
    assert torch.equal(args["paged_kv_cache"][3, 1, 4], args["append_value"][1])
