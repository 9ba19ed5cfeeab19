"""Every check of the fake FlashInfer's wrappers, seen to fail: one thing broken of a step that is correct."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kernels.testing import fake_flashinfer
from kernels.testing.fake_cuda import FakeAccelerator, FakeCudaError
from kernels.testing.fake_flashinfer import FakeFlashInfer, MisuseError
from tests.kernels.testing.flashinfer_case import (
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    NUM_PAGES,
    PAGE_SIZE,
    WORKSPACE,
    Levels,
    Step,
    cascade,
    create_buffers,
    decode,
    graph_wrapper,
    ints,
    on_device,
    plan_graph,
    pool,
    prefill,
    random,
)

DEVICE_KV, DEVICE_QO, DEVICE_LAST = on_device(0, 2, 5), on_device(0, 3, 4), on_device(2, 4)
Changes = dict[str, Any]

# (what is broken, the message)
BOTH: tuple[tuple[Changes, str], ...] = (
    ({"workspace": torch.zeros(1 << 20)}, "must be uint8"),
    ({"workspace": torch.zeros(2, 16 << 20, dtype=torch.uint8)}, "one contiguous row"),
    ({"workspace": WORKSPACE[8:]}, "16-byte aligned"),
    ({"workspace": WORKSPACE[: 1 << 20]}, "batch_prefill_tmp_v needs"),
    ({"create": {"kv_layout": "HND"}}, "built for NHD"),
    ({"create": {"backend": "cudnn"}}, "backend 'cudnn' is not modelled"),
    ({"create": {"jit_args": ["name"]}}, "not modelled by the fake: jit_args"),
    ({"options": {"q_data_type": "float16"}}, "q is torch.bfloat16, planned torch.float16"),
    ({"options": {"q_data_type": "float32"}}, "q_data_type torch.float32 has no kernels"),
    ({"options": {"q_data_type": 16}}, "dtype must be a string or torch.dtype"),
    ({"options": {"kv_data_type": torch.float16}}, "KV torch.float16: not modelled"),
    ({"options": {"kv_data_type": torch.float32}}, "kv_data_type torch.float32 has no kernels"),
    ({"options": {"window_left": -2}}, "window_left -2"),
    ({"options": {"logits_soft_cap": -1.0}}, "would be ignored"),
    ({"options": {"pos_encoding_mode": "ROPE_LLAMA"}}, "not modelled by the fake: pos_encoding_mode"),
    ({"options": {"o_data_type": torch.float16}}, "not modelled by the fake: o_data_type"),
    ({"kv": ints(0, 2, 5).long()}, "must be int32"),
    ({"kv": ints(0, 2, 5).unsqueeze(0)}, "must have 1 dimension"),
    ({"kv": ints(0, 9, 2, 9, 5, 9)[::2]}, "must be contiguous"),
    ({"kv": ints(1, 2, 5)}, "must start at 0"),
    ({"kv": ints(0, 6, 5)}, "must not fall"),
    ({"kv": ints(0)}, "at least one request"),
    ({"kv": ints(0, 2, 6)}, "has 5 pages, kv_indptr names 6"),
    ({"kv": ints(0, 2, 4)}, "more than kv_indptr's 4"),
    ({"kv": ints(0, 5, 5)}, "request 1 has no page"),
    ({"kv": ints(0, 2, 4, 5)}, "disagree on B"),
    ({"indices": DEVICE_KV[0], "kv": DEVICE_KV[1]}, "indptr is on the device"),
    ({"indices": DEVICE_LAST[0], "last": DEVICE_LAST[1]}, "last_page_len is on the device"),
    ({"last": ints(2, 4).long()}, "last_page_len must be int32"),
    ({"last": ints(0, 4)}, "last_page_len must be 1..4"),
    ({"last": ints(2, 5)}, "last_page_len must be 1..4"),
    ({"indices": ints(3, 4, 7, 8, 9).long()}, "kv_indices must be int32"),
    ({"indices": ints(3, 4, 7, 8, NUM_PAGES)}, "outside of the pool's 20"),
    ({"indices": ints(3, 4, 7, -1, 9)}, "outside of the pool's 20"),
    ({"indices": ints(3, 4, 7, 8, 7)}, "request 1 has a page twice"),
    ({"heads": 3}, "3 query heads on 2 KV heads"),
    ({"head_dim": 80}, "head_dim 80 is not in"),
    ({"page_size": 0}, "page_size must be positive"),
    ({"q": random(4, HEADS, HEAD_DIM).half()}, "q is torch.float16"),
    ({"q": random(5, HEADS, HEAD_DIM)}, "does not match qo_indptr"),
    ({"q": random(4, HEADS * HEAD_DIM)}, "q must be"),
    ({"q": random(4, HEADS * 2, HEAD_DIM)}, "q is .*planned"),
    ({"q": random(4, HEADS, HEAD_DIM * 2)[..., ::2]}, "contiguous at its last dimension"),
    ({"q": random(4, HEADS, HEAD_DIM + 4)[..., :HEAD_DIM]}, "not 16-byte aligned"),
    ({"pool": pool().unbind(1)}, "one 5-D tensor"),
    ({"pool": pool()[:, 0]}, "must be 5-D"),
    ({"pool": pool().float()}, "no kernels"),
    ({"pool": pool().half()}, "planned torch.bfloat16"),
    ({"pool": pool().flatten(2, 3).unflatten(2, (8, 1))}, "planned .*4, 2, 64"),
    ({"pool": random(NUM_PAGES, 2, KV_HEADS, PAGE_SIZE, HEAD_DIM).transpose(2, 3)}, "must be contiguous"),
    ({"pool": random(pool().numel() + 4)[4:].view(pool().shape)}, "paged_kv_cache has rows"),
    ({"run": {"window_left": 3}}, "window_left 3, planned -1"),
    ({"run": {"out": random(4, HEADS, 32)}}, "out is"),
    ({"run": {"out": random(4, HEADS, HEAD_DIM).half()}}, "out is"),
    ({"run": {"lse": torch.zeros(1, HEADS)}}, "lse is"),
    ({"run": {"k_scale": 0.5}}, "not modelled by the fake: scales"),
    ({"run": {"sinks": torch.zeros(HEADS)}}, "not modelled by the fake: sinks"),
)
PREFILL: tuple[tuple[Changes, str], ...] = (
    ({"indices": DEVICE_QO[0], "qo": DEVICE_QO[1]}, "qo_indptr is on the device"),
    ({"qo": ints(0, 4, 3)}, "qo_indptr must not fall"),
    ({"qo": ints(0, 0, 0), "q": random(0, HEADS, HEAD_DIM)}, "no query at all"),
    ({"qo": ints(0, 7, 8), "q": random(8, HEADS, HEAD_DIM)}, "7 queries on 6 keys"),
    ({"options": {"custom_mask": torch.ones(30)}}, "not modelled by the fake: custom_mask"),
    ({"options": {"seq_lens": ints(6, 12)}}, "not modelled by the fake: lens"),
    ({"options": {"head_dim_vo": 128}}, "not modelled by the fake: head_dim_vo"),
    ({"create": {"qo_indptr_buf": ints(0, 0, 0)}}, "buffers are for use_cuda_graph=True"),
    ({"create": {"use_cuda_graph": True}}, "qo_indptr_buf should be a tensor"),
    ({"create": {"max_total_num_rows": 4}}, "max_total_num_rows requires"),
    ({"run": {"lse_base": "e"}}, "not modelled by the fake: lse"),
)
DECODE: tuple[tuple[Changes, str], ...] = (
    ({"workspace": torch.ones(32 << 20, dtype=torch.uint8)}, "must be zeroed"),
    ({"options": {"q_data_type": None}}, "q_data_type must be given"),
    ({"options": {"q_len_per_req": 0}}, "no query at all"),
    ({"options": {"data_type": torch.bfloat16}}, "not modelled by the fake: data_type"),
    ({"options": {"window_right": 1}}, "not modelled by the fake: window_right"),
    ({"options": {"fixed_split_size": 4}, "create": {"use_tensor_cores": False}}, "only supported by tensor core"),
    ({"options": {"q_len_per_req": 2}, "create": {"use_tensor_cores": False}}, "requires tensor-core"),
    ({"heads": 14, "kv_heads": 2, "create": {"use_tensor_cores": False}}, "7 query heads on a KV head"),
    ({"run": {"q_len_per_req": 1}}, "not modelled by the fake: q_len_per_req"),
    ({"create": {"use_cuda_graph": True}}, "should be a tensor in CUDA graph mode"),
)


def _named(table: tuple[tuple[Changes, str], ...]) -> list[Any]:
    return [pytest.param(*case, id=f"{'-'.join(case[0])}: {case[1]}") for case in table]


@pytest.mark.parametrize(("changes", "message"), _named(BOTH + PREFILL))
def test_flashinfer_prefill_refuses(changes: Changes, message: str) -> None:
    with pytest.raises(MisuseError, match=message):
        prefill(replace(Step(), **changes))


@pytest.mark.parametrize(("changes", "message"), _named(BOTH + DECODE))
def test_flashinfer_decode_refuses(changes: Changes, message: str) -> None:
    with pytest.raises(MisuseError, match=message):
        decode(replace(Step(), **changes))


def test_flashinfer_steps_are_correct_as_they_stand() -> None:
    assert prefill(Step()).shape == (4, HEADS, HEAD_DIM)
    assert decode(Step()).shape == (2, HEADS, HEAD_DIM)
    assert cascade(Levels()).shape == (4, HEADS, HEAD_DIM)


def test_flashinfer_out_may_not_be_the_query() -> None:
    step = Step()
    with pytest.raises(MisuseError, match="out overlaps q"):
        prefill(replace(step, run={"out": step.q}))


def test_flashinfer_decode_plan_takes_options_by_name_only() -> None:
    step, wrapper = Step(), fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE)
    with pytest.raises(MisuseError, match="must be given by name"):
        wrapper.plan(step.kv, step.indices, step.last, *step.shape(), "NONE")


@pytest.mark.parametrize("name", ["BatchPrefillWithPagedKVCacheWrapper", "BatchDecodeWithPagedKVCacheWrapper"])
def test_flashinfer_run_needs_a_plan(name: str) -> None:
    with pytest.raises(MisuseError, match=r"run\(\) before plan\(\)"):
        getattr(fake_flashinfer, name)(WORKSPACE).run(Step().q, pool())


CASCADE: tuple[tuple[Changes, str], ...] = (
    ({"options": {"window_left": 8}}, "window within a cascade"),
    ({"last": [ints(3), ints(4, 1)]}, "level 0 ends within a page"),
    ({"kv": [ints(0, 2), ints(0, 2, 2)]}, "request 1 has no page"),
    ({"kv": [ints(0, 0), ints(0, 1, 2)], "indices": [ints(), ints(5, 6)]}, "request 0 has no page"),
    ({"qo": [ints(0, 3), ints(0, 3, 4)]}, "levels of"),
    ({"last": [ints(4), ints(2, 1)]}, "3 queries on 2 keys"),
    ({"last": [ints(4), ints(2, 1)], "options": {"causal": False}}, "3 queries on 2 keys of its own"),
    ({"indices": [ints(3, 4), ints(4, 6)]}, "level 1 has pages of the levels above"),
    ({"num_levels": 0}, "0 levels"),
    ({"create": {"qo_indptr_buf_arr": [ints(0, 0)]}}, "buffers are for use_cuda_graph=True"),
    ({"create": {"use_cuda_graph": True}}, "must come once a level"),
)


@pytest.mark.parametrize(("changes", "message"), _named(CASCADE))
def test_flashinfer_cascade_refuses(changes: Changes, message: str) -> None:
    with pytest.raises(MisuseError, match=message):
        cascade(replace(Levels(), **changes))


def test_flashinfer_cascade_takes_as_many_arrays_as_levels() -> None:
    with pytest.raises(ValueError, match="zip"):
        cascade(replace(Levels(), qo=[ints(0, 4)]))


# ---------------------------------------------------------------------- graphs


def planned_graph() -> tuple[Any, Any, Step]:
    buffers = create_buffers()
    step = buffers.load(Step())
    wrapper = graph_wrapper(buffers)
    plan_graph(wrapper, step)
    return wrapper, buffers, step


GRAPH: tuple[tuple[Changes, str], ...] = (
    ({"kv": ints(0, 1, 2, 5), "last": ints(1, 1, 1)}, "batch size should be fixed"),
    ({"kv": ints(0, 4, 9), "indices": torch.arange(9, dtype=torch.int32)}, "exceed the allocated buffer of 8"),
    ({"options": {"q_len_per_req": 2}}, "q_len_per_req is part of the frozen"),
)


@pytest.mark.parametrize(("changes", "message"), _named(GRAPH))
def test_flashinfer_graph_decode_refuses(changes: Changes, message: str) -> None:
    wrapper, _, step = planned_graph()
    with pytest.raises(MisuseError, match=message):
        plan_graph(wrapper, replace(step, **changes))


FAST: tuple[tuple[Changes, str], ...] = (
    ({"indices": ints(3, 4, 7, 8, 9)}, "must lie in the wrapper's buffer"),
    ({"options": {"q_data_type": None}}, "the module was built for"),
    ({"heads": 8}, "the module was built for"),
    ({"options": {"window_left": 4}}, "compiled into the module"),
    ({"options": {"logits_soft_cap": 30.0}}, "compiled into the module"),
    ({"kv": ints(0, 1, 2, 5), "last": ints(1, 1, 1)}, "batch size should be fixed"),
    ({"options": {"data_type": torch.bfloat16}}, "not modelled by the fake: data_type"),
    ({"options": {"q_len_per_req": 2}}, "q_len_per_req is part of the frozen"),
)


@pytest.mark.parametrize(("changes", "message"), _named(FAST))
def test_flashinfer_fast_plan_refuses(changes: Changes, message: str) -> None:
    wrapper, _, step = planned_graph()
    with pytest.raises(MisuseError, match=message):
        plan_graph(wrapper, replace(step, **changes), fast=True)


def test_flashinfer_fast_plan_needs_a_plan_before() -> None:
    buffers = create_buffers()
    with pytest.raises(MisuseError, match="no cached module"):
        plan_graph(graph_wrapper(buffers), buffers.load(Step()), fast=True)


def test_flashinfer_fast_plan_is_for_graphs() -> None:
    step, wrapper = Step(), fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, use_tensor_cores=True)
    plan_graph(wrapper, step)
    with pytest.raises(MisuseError, match="takes host arrays for the device's"):
        plan_graph(wrapper, step, fast=True)


def _set(tensor: torch.Tensor, index: int, value: int) -> None:
    tensor[index] = value


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda buffers: _set(buffers.kv, 1, 3), "kv_indptr on the device"),
        (lambda buffers: _set(buffers.last, 1, 3), "last_page_len on the device"),
        (lambda buffers: _set(buffers.indices, 0, NUM_PAGES), "outside of the pool's"),
        (lambda buffers: _set(buffers.indices, 0, 4), "has a page twice"),
    ],
)
def test_flashinfer_fast_plan_copies_nothing(break_it: Callable[[Any], None], message: str) -> None:
    wrapper, buffers, step = planned_graph()
    break_it(buffers)
    plan_graph(wrapper, step, fast=True)
    with pytest.raises(MisuseError, match=message):
        wrapper.run(step.q[2:], step.pool)


def test_flashinfer_graph_buffers_must_fit_each_other() -> None:
    buffers = create_buffers()
    with pytest.raises(MisuseError, match="4 offsets for 2 requests"):
        graph_wrapper(replace(buffers, kv=ints(0, 0, 0, 0)))
    with pytest.raises(MisuseError, match="must be int32"):
        graph_wrapper(replace(buffers, last=buffers.last.long()))


def test_flashinfer_plan_reads_no_array_of_its_own_buffers() -> None:
    wrapper, buffers, step = planned_graph()
    with pytest.raises(MisuseError, match="last_page_len is on the device"):
        plan_graph(wrapper, replace(step, last=buffers.last, indices=ints(3, 4, 7, 8, 9)))


def test_flashinfer_graph_prefill_keeps_to_its_rows() -> None:
    buffers = (ints(0, 0, 0), ints(0, 0, 0), torch.zeros(8, dtype=torch.int32), ints(0, 0))
    wrapper = fake_flashinfer.BatchPrefillWithPagedKVCacheWrapper(WORKSPACE, "NHD", True, *buffers)
    step = Step()

    def plan(qo: torch.Tensor) -> None:
        wrapper.plan(qo, step.kv, step.indices, step.last, *step.shape(), q_data_type=torch.bfloat16, causal=True)

    plan(step.qo)
    with pytest.raises(MisuseError, match="5 rows exceed the 4 of the first plan"):
        plan(ints(0, 3, 5))


# ---------------------------------------------------------------------- with an accelerator


def test_flashinfer_plan_inside_a_capture_is_refused() -> None:
    wrapper, _, step = planned_graph()
    with pytest.raises(MisuseError, match="inside a graph capture"):
        FakeAccelerator().capture(lambda: plan_graph(wrapper, step, fast=True))


@pytest.mark.parametrize("fast", [False, True])
def test_flashinfer_plan_waits_for_the_step_before(fast: bool) -> None:
    accelerator, buffers = FakeAccelerator(), create_buffers()
    wrapper, step = graph_wrapper(buffers, module=FakeFlashInfer(accelerator)), buffers.load(Step())
    plan_graph(wrapper, step)
    accelerator.event().synchronize()
    plan_graph(wrapper, step, fast=fast)
    with pytest.raises(FakeCudaError, match="still read"):
        plan_graph(wrapper, step, fast=fast)


def test_flashinfer_an_event_before_the_plan_does_not_free_its_staging_buffer() -> None:
    accelerator = FakeAccelerator()
    wrapper = FakeFlashInfer(accelerator).BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, use_tensor_cores=True)
    early = accelerator.event()
    plan_graph(wrapper, Step())
    early.synchronize()
    with pytest.raises(FakeCudaError, match="still read"):
        plan_graph(wrapper, Step())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"options": {"sm_scale": 0.5}}, "captured with .* planned with"),
        ({"kv": ints(0, 2, 4)}, "kv_indptr on the device"),
    ],
)
def test_flashinfer_replay_refuses_a_plan_that_it_cannot_know(changes: Changes, message: str) -> None:
    accelerator = FakeAccelerator()
    wrapper, buffers, step = planned_graph()
    graph = accelerator.capture(lambda: wrapper.run(step.q[2:], step.pool))
    changed = replace(step, **changes)
    changed.indices = buffers.indices[: int(changed.kv[-1])]
    plan_graph(wrapper, changed, fast=True)
    with pytest.raises(MisuseError, match=message):
        graph.replay()


def test_flashinfer_wrappers_that_share_an_int_workspace_run_before_another_plans() -> None:
    shared = torch.zeros(1 << 20, dtype=torch.uint8)
    wrappers = [fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, use_tensor_cores=True) for _ in range(2)]
    step = Step()
    for wrapper in wrappers:
        wrapper.reset_workspace_buffer(WORKSPACE, shared)
        plan_graph(wrapper, step)
    wrappers[1].run(step.q[2:], step.pool)
    with pytest.raises(MisuseError, match="holds another wrapper's schedule"):
        wrappers[0].run(step.q[2:], step.pool)


@pytest.mark.parametrize(
    ("floats", "ints_", "message"),
    [
        (WORKSPACE, torch.zeros(256, dtype=torch.int32), "int_workspace_buffer must be uint8"),
        (WORKSPACE[8:], torch.zeros(1024, dtype=torch.uint8), "float_workspace_buffer must be 16-byte aligned"),
        (WORKSPACE, torch.zeros(1024, dtype=torch.uint8), "int workspace of 1024 bytes"),
    ],
)
def test_flashinfer_workspaces_of_another_size_are_checked(
    floats: torch.Tensor, ints_: torch.Tensor, message: str
) -> None:
    wrapper = fake_flashinfer.BatchDecodeWithPagedKVCacheWrapper(WORKSPACE, use_tensor_cores=True)
    with pytest.raises(MisuseError, match=message):
        wrapper.reset_workspace_buffer(floats, ints_)
        plan_graph(wrapper, Step())


def test_flashinfer_new_workspaces_need_a_new_plan() -> None:
    wrapper, _, step = planned_graph()
    wrapper.reset_workspace_buffer(WORKSPACE, torch.zeros(1 << 20, dtype=torch.uint8))
    with pytest.raises(MisuseError, match=r"run\(\) before plan\(\)"):
        wrapper.run(step.q[2:], step.pool)
