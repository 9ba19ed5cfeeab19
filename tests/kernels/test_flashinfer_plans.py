"""Plans over the fake FlashInfer: graphs that are replayed, shared prefixes, and the rule of the staging memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch

from kernels.backend import StepMeta
from kernels.flashinfer_backend import FlashInferBackend
from kernels.flashinfer_plans import StepPlan
from kernels.testing.fake_cuda import FakeAccelerator, FakeCudaError, FakeGraph
from kernels.testing.fake_flashinfer import FakeFlashInfer, MisuseError
from tests.kernels.attention_case import create_spec
from tests.kernels.decoding_case import DecodingCase, Heads, attend_layers
from tests.kernels.flashinfer_machine import create_backend
from tests.kernels.graph_step import GraphStep

TOLERANCE = {"rtol": 2e-2, "atol": 2e-2}
PLAIN = create_spec()
KINDS = (PLAIN, create_spec(window_left=20), create_spec(soft_cap=3.0), PLAIN)
LENGTHS = (1, 15, 16, 31, 50)
LONG = (257, 258, 272, 273, 288, 300, 320, 257, 400)  # behind 16 shared pages


@pytest.fixture
def backend() -> FlashInferBackend:
    return create_backend()


class CapturedStep:
    """Decode steps of one batch size as one graph, planned and replayed as a runner does."""

    def __init__(self, backend: FlashInferBackend, case: DecodingCase, size: int, *, is_shared: bool = False) -> None:
        self._backend, self._kv = backend, case.kv
        self._memory = GraphStep(size, page_size=16, room=size * 32, shared_room=32 if is_shared else 0)
        self._num_shared = case.num_shared_pages if is_shared else 0
        specs = case.kv.layer_specs
        self._heads: list[Heads] = [
            (
                torch.zeros(size, spec.num_q_heads, spec.head_dim, dtype=torch.bfloat16),
                torch.zeros(size, spec.num_kv_heads, spec.head_dim, dtype=torch.bfloat16),
                torch.zeros(size, spec.num_kv_heads, spec.head_dim, dtype=torch.bfloat16),
            )
            for spec in specs
        ]
        self._outs = [q.flatten(1).clone() for q, _, _ in self._heads]
        self._graph: FakeGraph | None = None

    def plan(self, meta: StepMeta) -> StepPlan:
        with torch.inference_mode():
            tensors = self._memory.fill(meta, self._num_shared)
        return self._backend.plan_step(tensors, self._kv, in_graph=True)

    def replay(self, plan: StepPlan, heads: Sequence[Heads]) -> list[torch.Tensor]:
        """What the graph makes of the step, captured on first use; without the padding."""
        num_reqs = len(heads[0][0])
        for static, given in zip(self._heads, heads, strict=True):
            for target, source in zip(static, given, strict=True):
                target[:num_reqs].copy_(source)
        if self._graph is None:
            self._body(plan)
            self._graph = self._backend.accelerator.capture(lambda: self._body(plan))
        for out in self._outs:
            out.fill_(torch.nan)
        self._graph.replay()
        return [out[:num_reqs] for out in self._outs]

    def _body(self, plan: StepPlan) -> None:
        for layer, (q, k, v) in enumerate(self._heads):
            self._outs[layer].copy_(self._backend.attention(plan, layer, q, k, v, self._kv))


def assert_all_close(actual: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)


@pytest.mark.parametrize("size", [5, 8], ids=["full", "padded"])
@torch.inference_mode()
def test_a_graph_is_replayed_over_growing_contexts(backend: FlashInferBackend, size: int) -> None:
    """17 steps: every request begins another page, and the windows leave their first ones."""
    case = DecodingCase(backend, KINDS, LENGTHS)
    captured = CapturedStep(backend, case, size)
    for _ in range(17):
        meta, heads, expected = case.next_step()
        assert_all_close(captured.replay(captured.plan(meta), heads), expected)


@torch.inference_mode()
def test_graphs_of_several_sizes_and_eager_steps_take_turns(backend: FlashInferBackend) -> None:
    """They share the schedule's memory on the device."""
    case = DecodingCase(backend, KINDS[:2], LENGTHS)
    graphs = [CapturedStep(backend, case, size) for size in (5, 8, 16)]
    for turn in (0, 1, 2, 3, 2, 1, 0, 3, 0):
        meta, heads, expected = case.next_step()
        if turn == 3:
            actual = attend_layers(backend, meta, heads, case.kv)
        else:
            actual = graphs[turn].replay(graphs[turn].plan(meta), heads)
        assert_all_close(actual, expected)


@pytest.mark.parametrize("size", [9, 16], ids=["full", "padded"])
@torch.inference_mode()
def test_a_graph_reads_a_shared_prefix_once(backend: FlashInferBackend, size: int) -> None:
    case = DecodingCase(backend, (PLAIN, create_spec(soft_cap=3.0)), LONG, num_shared_pages=16)
    captured = CapturedStep(backend, case, size, is_shared=True)
    for _ in range(17):
        meta, heads, expected = case.next_step()
        assert backend.num_shared_pages(meta, case.kv) == 16
        assert_all_close(captured.replay(captured.plan(meta), heads), expected)


@pytest.mark.parametrize("q_lens", [(1,) * 9, (1, 1, 2, 3, 5, 7, 15, 16, 17)], ids=["decodes", "chunks"])
@torch.inference_mode()
def test_any_step_reads_a_shared_prefix_once(backend: FlashInferBackend, q_lens: tuple[int, ...]) -> None:
    """With the cascade, without it and on the reference: the same."""
    case = DecodingCase(backend, (PLAIN,), LONG, num_shared_pages=16)
    meta, heads, expected = case.next_step(q_lens)
    with_cascade = attend_layers(backend, meta, heads, case.kv)
    assert backend._flashinfer.calls[-1].name == "MultiLevelCascadeAttentionWrapper.run"
    meta.num_common_pages = 0
    without = attend_layers(backend, meta, heads, case.kv)
    assert backend._flashinfer.calls[-1].name == "BatchPrefillWithPagedKVCacheWrapper.run"
    assert_all_close(with_cascade, expected)
    assert_all_close(with_cascade, without)


@torch.inference_mode()
def test_layers_of_one_kind_share_one_plan(backend: FlashInferBackend) -> None:
    case = DecodingCase(backend, KINDS, LENGTHS)
    captured = CapturedStep(backend, case, 8)
    for _ in range(3):
        meta, heads, _ = case.next_step()
        before = len(backend._flashinfer.calls)
        plan = captured.plan(meta)
        assert len(plan.kinds) == 3
        captured.replay(plan, heads)
        names = [call.name for call in backend._flashinfer.calls[before:]]
        assert sum("plan" in name for name in names) == 3
    assert names == ["fast_decode_plan"] * 3  # a replay calls nothing


def test_a_graphs_plan_is_the_same_object_for_the_same_size(backend: FlashInferBackend) -> None:
    case = DecodingCase(backend, (PLAIN,), LONG, num_shared_pages=16)
    plain, other_size, shared = (
        CapturedStep(backend, case, size, is_shared=is_shared)
        for size, is_shared in ((9, False), (16, False), (9, True))
    )
    plans = {}
    for _ in range(2):
        meta, _, _ = case.next_step()
        for captured in (plain, other_size, shared):
            plan = captured.plan(meta)
            assert plans.setdefault(captured, plan) is plan
    assert len({id(plan) for plan in plans.values()}) == 3


def test_a_graphs_step_in_other_memory_is_refused(backend: FlashInferBackend) -> None:
    case = DecodingCase(backend, (PLAIN,), LENGTHS)
    one, other = (CapturedStep(backend, case, 8) for _ in range(2))
    meta, _, _ = case.next_step()
    one.plan(meta)
    with pytest.raises(AssertionError, match="always the same memory"):
        other.plan(meta)


@pytest.mark.parametrize("is_shared", [False, True], ids=["decode", "cascade"])
def test_a_plan_is_renewed_outside_of_the_mode_it_was_made_in(backend: FlashInferBackend, is_shared: bool) -> None:
    """A loop in inference mode made the wrappers and their buffers, and another one plans with them."""
    with torch.inference_mode():
        case = DecodingCase(backend, (PLAIN,), LONG, num_shared_pages=16 if is_shared else 0)
        captured = CapturedStep(backend, case, 9, is_shared=is_shared)
        captured.plan(case.next_step()[0])
        meta, _, _ = case.next_step()
    tensors = captured.plan(meta).tensors
    assert tensors.pages.indptr.tolist() == tensors.pages.indptr_host.tolist()


@torch.inference_mode()
def test_no_prefix_is_shared_by_more_requests_than_a_graph_has_room_for() -> None:
    """Where every query head has keys of its own, partial results are many: here the largest batch that fits."""
    spec = create_spec(num_kv_heads=32, ratio=1)
    accelerator = FakeAccelerator()
    backend = FlashInferBackend(
        flashinfer=FakeFlashInfer(accelerator), accelerator=accelerator, num_workspace_bytes=4_400_000
    )
    for size, fits in ((32, True), (33, False)):
        case = DecodingCase(backend, (spec,), (257,) * size, num_shared_pages=16)
        captured = CapturedStep(backend, case, size, is_shared=True)
        meta, _, _ = case.next_step()
        assert (backend.num_shared_pages(meta, case.kv) > 0) == fits
        with nullcontext() if fits else pytest.raises(MisuseError, match="float workspace"):
            captured.plan(meta)


def test_another_pool_gets_plans_of_its_own(backend: FlashInferBackend) -> None:
    """As after a trial run that finds out how large the pool may be."""
    cases = [DecodingCase(backend, (PLAIN,), LENGTHS) for _ in range(2)]
    plans = []
    for case in cases:
        meta, _, _ = case.next_step()
        plans.append(CapturedStep(backend, case, 8).plan(meta))
    assert plans[0] is not plans[1]


def accelerator_of(backend: FlashInferBackend) -> FakeAccelerator:
    assert isinstance(backend.accelerator, FakeAccelerator)
    return backend.accelerator


@pytest.mark.parametrize("is_shared", [False, True], ids=["decode", "cascade"])
@pytest.mark.parametrize("in_graph", [False, True], ids=["eager", "graph"])
def test_the_next_plan_waits_until_the_last_schedule_is_copied(
    backend: FlashInferBackend, is_shared: bool, in_graph: bool
) -> None:
    """The fake raises where it does not: the wrapper would write its pinned memory under the copy."""
    case = DecodingCase(backend, (PLAIN,), LONG, num_shared_pages=16 if is_shared else 0)
    captured = CapturedStep(backend, case, 9, is_shared=is_shared)

    def plan() -> StepPlan:
        meta, _, _ = case.next_step()
        return captured.plan(meta) if in_graph else backend.plan(meta, case.kv)

    plan()
    for attention in plan().kinds.values():
        attention._staged = None  # forget the event
    with pytest.raises(FakeCudaError):
        plan()


def test_the_next_plan_does_not_wait_for_the_step(backend: FlashInferBackend) -> None:
    """Overlap: while step n computes, step n+1 is planned. What was queued behind the plan's copy is still going on."""
    accelerator = accelerator_of(backend)
    case = DecodingCase(backend, (PLAIN,), LENGTHS)
    captured = CapturedStep(backend, case, 8)
    captured.plan(case.next_step()[0])
    accelerator.synchronize()
    captured.plan(case.next_step()[0])
    assert accelerator.num_pending == 1
    source = accelerator.pinned(4)
    accelerator.upload(source, torch.zeros(4, dtype=torch.int32))  # stands for step n
    assert accelerator.num_pending == 2
    captured.plan(case.next_step()[0])
    assert accelerator.num_pending == 2  # step n, and the new plan's copy; the old one's is done


@torch.inference_mode()
def test_a_replay_needs_a_plan_of_its_own(backend: FlashInferBackend) -> None:
    """Another size's plan is in the memory that both share."""
    case = DecodingCase(backend, (PLAIN,), LENGTHS)
    small, large = (CapturedStep(backend, case, size) for size in (5, 8))
    for captured in (small, large):
        meta, heads, _ = case.next_step()
        plan = captured.plan(meta)
        captured.replay(plan, heads)
    with pytest.raises(MisuseError, match="another wrapper's schedule"):
        small.replay(plan, heads)


def test_decode_graphs_run_on_tensor_cores_and_prefills_choose(backend: FlashInferBackend) -> None:
    case = DecodingCase(backend, (PLAIN,), LENGTHS)
    captured = CapturedStep(backend, case, 8)
    meta, _, _ = case.next_step()
    captured.plan(meta)
    backend.plan(meta, case.kv)
    made = {call.name: call.kwargs for call in backend._flashinfer.calls if call.name.endswith("__init__")}
    decode = made["BatchDecodeWithPagedKVCacheWrapper.__init__"]
    assert (decode["backend"], decode["use_tensor_cores"], decode["use_cuda_graph"]) == ("fa2", True, True)
    assert made["BatchPrefillWithPagedKVCacheWrapper.__init__"]["backend"] == "auto"
