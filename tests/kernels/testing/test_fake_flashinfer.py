"""What the fake FlashInfer computes, by arithmetic of its own; its graphs; the calls that it keeps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.testing import fake_flashinfer
from kernels.testing.fake_cuda import FakeAccelerator
from kernels.testing.fake_flashinfer import Call, FakeFlashInfer, TensorLike
from tests.kernels.testing.flashinfer_case import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    PAGE_SIZE,
    WORKSPACE,
    Levels,
    Step,
    cascade,
    create_buffers,
    decode,
    graph_wrapper,
    ints,
    plan_graph,
    pool,
    prefill,
    random,
)

TOLERANCE = {"rtol": 2e-2, "atol": 2e-2}


def key_and_value(pages: torch.Tensor, table: list[int], position: int) -> tuple[torch.Tensor, torch.Tensor]:
    page = pages[table[position // PAGE_SIZE]].float()
    return page[0, position % PAGE_SIZE], page[1, position % PAGE_SIZE]


def attend_one(
    q: torch.Tensor, pages: torch.Tensor, table: list[int], seen: range, *, scale: float, cap: float = 0.0
) -> tuple[list[torch.Tensor], list[float]]:
    """One query, number by number: per head its output and the sum of its weights as a base-2 logarithm."""
    outs, sums = [], []
    for head in range(HEADS):
        keys = [key_and_value(pages, table, position) for position in seen]
        scores = [float(q[head].float() @ k[head // (HEADS // KV_HEADS)]) * scale for k, _ in keys]
        if cap:
            scores = [cap * math.tanh(score / cap) for score in scores]
        weights = [math.exp(score) for score in scores]
        values = [v[head // (HEADS // KV_HEADS)] * w for (_, v), w in zip(keys, weights, strict=True)]
        outs.append(torch.stack(values).sum(dim=0) / sum(weights))
        sums.append(math.log2(sum(weights)))
    return outs, sums


KINDS: list[tuple[dict[str, Any], str]] = [
    ({}, "plain"),
    ({"sm_scale": 0.3}, "scale"),
    ({"logits_soft_cap": 2.0}, "cap"),
    ({"window_left": 0}, "itself only"),
    ({"window_left": 2}, "window"),
    ({"window_left": 100, "logits_soft_cap": 5.0, "sm_scale": 0.2}, "all"),
]


@pytest.mark.parametrize("options", [kind for kind, _ in KINDS], ids=[name for _, name in KINDS])
def test_flashinfer_prefill_number_by_number(options: dict[str, Any]) -> None:
    step = replace(Step(), options=options, run={"return_lse": True})
    out, lse = prefill(step)
    scale, cap = options.get("sm_scale", HEAD_DIM**-0.5), options.get("logits_soft_cap", 0.0)
    for row, (table, position) in enumerate([([3, 4], 3), ([3, 4], 4), ([3, 4], 5), ([7, 8, 9], 11)]):
        window = options.get("window_left", -1)
        first = 0 if window < 0 else max(0, position - window)
        outs, sums = attend_one(step.q[row], step.pool, table, range(first, position + 1), scale=scale, cap=cap)
        torch.testing.assert_close(out[row].float(), torch.stack(outs), **TOLERANCE)
        torch.testing.assert_close(lse[row], torch.tensor(sums), rtol=1e-4, atol=1e-4)


def test_flashinfer_without_causal_every_query_sees_every_key() -> None:
    step = replace(Step(), options={"causal": False}, run={"return_lse": True})
    out, lse = prefill(step)
    outs, sums = attend_one(step.q[0], step.pool, [3, 4], range(6), scale=HEAD_DIM**-0.5)
    torch.testing.assert_close(out[0].float(), torch.stack(outs), **TOLERANCE)
    torch.testing.assert_close(lse[0], torch.tensor(sums), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options", [kind for kind, _ in KINDS], ids=[name for _, name in KINDS])
@pytest.mark.parametrize("use_tensor_cores", [False, True])
def test_flashinfer_decode_is_prefill_of_one_query(options: dict[str, Any], use_tensor_cores: bool) -> None:
    step = replace(Step(), options=options)
    out = decode(replace(step, create={"use_tensor_cores": use_tensor_cores}))
    assert torch.equal(out, prefill(step)[2:])


def test_flashinfer_decode_of_two_queries_a_request_is_causal() -> None:
    step = replace(Step(), options={"q_len_per_req": 2})
    wrapper = fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, use_tensor_cores=True)
    plan_graph(wrapper, step)
    assert torch.equal(wrapper.run(step.q, step.pool), prefill(replace(Step(), qo=ints(0, 2, 4))))


def test_flashinfer_writes_into_out_and_lse() -> None:
    out, lse = torch.empty(4, HEADS, HEAD_DIM, dtype=torch.bfloat16), torch.empty(4, HEADS)
    made = prefill(replace(Step(), run={"out": out, "lse": lse, "return_lse": True}))
    assert made[0] is out
    assert made[1] is lse
    expected = prefill(replace(Step(), run={"return_lse": True}))
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])


def test_flashinfer_what_no_query_sees_may_be_garbage() -> None:
    step = Step()
    clean = prefill(step)
    step.pool[4, :, 2:] = float("nan")  # beyond last_page_len
    assert torch.equal(prefill(step), clean)
    windowed = replace(step, options={"window_left": 2})
    clean = prefill(windowed)
    step.pool[7:9] = float("nan")  # before the window of the second request's only query
    assert torch.equal(prefill(windowed), clean)


@pytest.mark.parametrize("causal", [True, False])
def test_flashinfer_cascade_is_attention_over_both_levels(causal: bool) -> None:
    together = Step(kv=ints(0, 3, 6), indices=ints(3, 4, 5, 3, 4, 6), last=ints(4, 1), options={"causal": causal})
    made = cascade(Levels(options={"causal": causal}))
    torch.testing.assert_close(made, prefill(together), **TOLERANCE)


def test_flashinfer_cascade_in_a_graph_reads_its_buffers_at_replay() -> None:
    accelerator = FakeAccelerator()
    flashinfer = FakeFlashInfer(accelerator)
    arrays = [[ints(0, 0), ints(0, 0, 0)] for _ in range(2)]
    ids, last = [torch.zeros(4, dtype=torch.int32) for _ in range(2)], [ints(0), ints(0, 0)]
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, WORKSPACE, "NHD", True, *arrays, ids, last)
    q, pages = random(2, HEADS, HEAD_DIM), pool()

    def plan(shared: torch.Tensor, own: torch.Tensor, own_last: torch.Tensor) -> torch.Tensor:
        levels = Levels([ints(0, 2), ints(0, 1, 2)], [ints(0, 2), ints(0, 1, 2)], [shared, own], [ints(4), own_last])
        shape = (HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE)
        options = {"causal": True, "q_data_type": torch.bfloat16}
        wrapper.plan(levels.qo, levels.kv, levels.indices, levels.last, *shape, **options)
        accelerator.event().synchronize()
        eager = fake_flashinfer.MultiLevelCascadeAttentionWrapper(2, WORKSPACE)
        eager.plan(levels.qo, levels.kv, levels.indices, levels.last, *shape, **options)
        return eager.run(q, pages)

    plan(ints(3, 4), ints(5, 6), ints(4, 1))
    outs: list[torch.Tensor] = []
    graph = accelerator.capture(lambda: outs.append(wrapper.run(q, pages)))
    expected = plan(ints(10, 11), ints(12, 13), ints(2, 3))
    graph.replay()
    assert torch.equal(outs[0], expected)


@pytest.mark.parametrize("fast", [False, True])
def test_flashinfer_graph_decode_reads_its_buffers_at_replay(fast: bool) -> None:
    accelerator, buffers = FakeAccelerator(), create_buffers()
    wrapper = graph_wrapper(buffers, module=FakeFlashInfer(accelerator))
    step = buffers.load(Step())
    plan_graph(wrapper, step)
    q, pages = step.q[2:].clone(), step.pool
    outs: list[torch.Tensor] = []
    graph = accelerator.capture(lambda: outs.append(wrapper.run(q, pages)))
    accelerator.event().synchronize()
    later = Step(kv=ints(0, 1, 3), indices=ints(2, 5, 6), last=ints(3, 1), pool=pages)
    later.q[2:] = random(2, HEADS, HEAD_DIM, seed=7)
    expected = decode(later)
    q.copy_(later.q[2:])
    plan_graph(wrapper, buffers.load(later), fast=fast)
    graph.replay()
    assert torch.equal(outs[0], expected)


def test_flashinfer_old_style_graph_wrapper_is_a_decode_wrapper() -> None:
    buffers, step = create_buffers(), Step()
    wrapper = fake_flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(
        WORKSPACE, buffers.kv, buffers.indices, buffers.last, use_tensor_cores=True
    )
    plan_graph(wrapper, step)
    assert wrapper.is_cuda_graph_enabled
    assert torch.equal(wrapper.run(step.q[2:], step.pool), decode(step))


# ---------------------------------------------------------------------- the calls it keeps


def test_flashinfer_keeps_calls_from_outside_and_none_of_their_tensors() -> None:
    flashinfer = FakeFlashInfer()
    flashinfer.silu_and_mul(random(2, 32))
    levels = Levels()
    wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, WORKSPACE)
    arrays = (levels.qo, levels.kv, levels.indices, levels.last)
    wrapper.plan(*arrays, HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE, q_data_type=torch.bfloat16, causal=True)
    wrapper.run(random(4, HEADS, HEAD_DIM), pool())
    assert [call.name for call in flashinfer.calls] == [
        "silu_and_mul",
        "MultiLevelCascadeAttentionWrapper.__init__",
        "MultiLevelCascadeAttentionWrapper.plan",
        "MultiLevelCascadeAttentionWrapper.run",
    ]
    assert flashinfer.calls[0] == Call("silu_and_mul", (TensorLike((2, 32), torch.bfloat16),), {})
    plan = flashinfer.calls[2]
    assert plan.args[0] == [TensorLike((2,), torch.int32), TensorLike((3,), torch.int32)]
    assert plan.args[4:] == (HEADS, KV_HEADS, HEAD_DIM, PAGE_SIZE)
    assert plan.kwargs == {"q_data_type": torch.bfloat16, "causal": True}


def test_flashinfer_old_style_graph_wrapper_is_one_call() -> None:
    flashinfer, buffers = FakeFlashInfer(), create_buffers()
    flashinfer.CUDAGraphBatchDecodeWithPagedKVCacheWrapper(WORKSPACE, buffers.kv, buffers.indices, buffers.last)
    assert [call.name for call in flashinfer.calls] == ["CUDAGraphBatchDecodeWithPagedKVCacheWrapper.__init__"]


def test_flashinfer_names_what_it_has_not() -> None:
    with pytest.raises(AttributeError, match="has no 'BatchAttention'"):
        FakeFlashInfer().BatchAttention


def test_flashinfer_object_has_all_that_the_module_has() -> None:
    flashinfer = FakeFlashInfer()
    assert flashinfer.__version__ == fake_flashinfer.__version__
    for thing in (*fake_flashinfer.FUNCTIONS, *fake_flashinfer.WRAPPERS):
        assert getattr(fake_flashinfer, thing.__name__) is thing
        assert callable(getattr(flashinfer, thing.__name__))
