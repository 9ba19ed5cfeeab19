"""FlashInfer's attention wrappers, and the plan that each needs once a step. The library comes in; nothing imports it.

A wrapper's plan() writes its schedule into pinned memory of the wrapper's own and queues one copy of it, so the next
plan() of the same wrapper first waits for an event recorded right behind that copy, before the step's kernels. One
such memory a wrapper is enough with one step in flight: step n's copy lies directly behind the kernels of step n-1,
whose results the host has by the time it plans step n+1, so it waits for nothing that still computes. On the device
all graphs of one kind of attention share one schedule's memory, because each plan's copy is queued behind the graph
that read the plan before it, and each replay has a plan of its own in front.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from kernels.accelerator import Accelerator, Event
from kernels.device_kv import DeviceKV
from kernels.device_step import CsrPages, StepTensors
from kernels.step import AttnSpec

_LAYOUT = "NHD"
# The library's recommendation: partial results of a context that several blocks of threads share.
FLOAT_WORKSPACE_BYTES = 128 << 20
# A graph's schedule: a few words for each tile of queries, of which a decode step has at most as many as requests and
# processors; 8,192 requests need 200 KiB. The wrappers' own 8 MiB stay for prefills.
_GRAPH_SCHEDULE_BYTES = 1 << 20


class Workspaces:
    """Device memory that wrappers share. Work on one stream has it one after the other.

    Attributes:
        floats: Zero at first, as the library demands.
    """

    def __init__(self, device: torch.device, num_float_bytes: int) -> None:
        self.floats = torch.zeros(num_float_bytes, dtype=torch.uint8, device=device)
        self._schedules: dict[tuple[AttnSpec, int], torch.Tensor] = {}

    def graph_schedule(self, spec: AttnSpec, level: int) -> torch.Tensor:
        """Return where the graphs of one kind of attention have their schedule; level 1 has the shared prefix's."""
        key = (spec, level)
        if key not in self._schedules:
            self._schedules[key] = torch.empty(_GRAPH_SCHEDULE_BYTES, dtype=torch.uint8, device=self.floats.device)
        return self._schedules[key]


class PlannedAttention:
    """One wrapper of the library: what attends for all layers of one kind, step after step."""

    def __init__(self, wrapper: Any, spec: AttnSpec, accelerator: Accelerator) -> None:
        self._wrapper = wrapper
        self._spec = spec
        self._accelerator = accelerator
        self._staged: Event | None = None

    def plan(self, tensors: StepTensors, kv: DeviceKV) -> None:
        """Prepare the wrapper for a step; waits for the copy of its last schedule, not for its last step."""
        if self._staged is not None:
            self._staged.synchronize()
        self._plan(tensors, kv)
        self._staged = self._accelerator.event()

    def attend(self, q: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """Attend from q, [T, num_q_heads, head_dim], to one layer's pages; the result has q's shape."""
        out = q.new_empty(q.shape)  # the prefill wrapper would zero one
        self._wrapper.run(q, pages, out=out)
        return out

    def _plan(self, tensors: StepTensors, kv: DeviceKV) -> None:
        raise NotImplementedError

    def _shape(self, kv: DeviceKV) -> tuple[int, int, int, int]:
        return self._spec.num_q_heads, self._spec.num_kv_heads, self._spec.head_dim, kv.page_size

    def _kind(self, kv: DeviceKV) -> dict[str, Any]:
        return {
            "pos_encoding_mode": "NONE",
            "window_left": self._spec.window_left,
            "logits_soft_cap": self._spec.soft_cap,
            "sm_scale": self._spec.sm_scale,
            "q_data_type": kv.dtype,  # float16 where it is not said
            "kv_data_type": kv.dtype,
        }


class EagerAttention(PlannedAttention):
    """Any step, kernel by kernel. On Hopper the library takes fa3 where a query is longer than 64, else fa2."""

    def __init__(self, library: Any, workspaces: Workspaces, spec: AttnSpec, accelerator: Accelerator) -> None:
        wrapper = library.BatchPrefillWithPagedKVCacheWrapper(workspaces.floats, _LAYOUT, backend="auto")
        super().__init__(wrapper, spec, accelerator)

    def _plan(self, tensors: StepTensors, kv: DeviceKV) -> None:
        pages = tensors.pages
        self._wrapper.plan(
            tensors.qo_indptr_host,
            pages.indptr_host,
            _used(pages),
            pages.last_page_len_host,
            *self._shape(kv),
            causal=True,
            **self._kind(kv),
        )


class CascadeAttention(PlannedAttention):
    """The shared pages once for all tokens, each request's own pages causally, and both results merged."""

    def attend(self, q: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        """See PlannedAttention; the library allocates the result."""
        out: torch.Tensor = self._wrapper.run(q, pages)
        return out

    def _plan(self, tensors: StepTensors, kv: DeviceKV) -> None:
        levels = _levels(tensors)
        self._wrapper.plan(
            [tensors.shared_qo_indptr_host, tensors.qo_indptr_host],
            [level.indptr_host for level in levels],
            [_used(level) for level in levels],
            [level.last_page_len_host for level in levels],
            *self._shape(kv),
            causal=True,  # of the last level only
            **self._kind(kv),
        )


class EagerCascade(CascadeAttention):
    """Any step with a shared prefix, kernel by kernel."""

    def __init__(self, library: Any, workspaces: Workspaces, spec: AttnSpec, accelerator: Accelerator) -> None:
        wrapper = library.MultiLevelCascadeAttentionWrapper(2, workspaces.floats, _LAYOUT)
        super().__init__(wrapper, spec, accelerator)


class GraphCascade(CascadeAttention):
    """Decode steps of one size with a shared prefix; the graph reads the step's own memory."""

    def __init__(
        self, library: Any, workspaces: Workspaces, spec: AttnSpec, accelerator: Accelerator, tensors: StepTensors
    ) -> None:
        levels = _levels(tensors)
        wrapper = library.MultiLevelCascadeAttentionWrapper(
            2,
            workspaces.floats,
            _LAYOUT,
            use_cuda_graph=True,
            qo_indptr_buf_arr=[tensors.shared_qo_indptr, tensors.qo_indptr],
            paged_kv_indptr_buf_arr=[level.indptr for level in levels],
            paged_kv_indices_buf_arr=[level.indices for level in levels],
            paged_kv_last_page_len_buf_arr=[level.last_page_len for level in levels],
        )
        schedules = [workspaces.graph_schedule(spec, level) for level in (1, 0)]
        wrapper.reset_workspace_buffer(workspaces.floats, schedules)
        super().__init__(wrapper, spec, accelerator)


class GraphDecode(PlannedAttention):
    """Decode steps of one size; the graph reads the step's own memory."""

    def __init__(
        self, library: Any, workspaces: Workspaces, spec: AttnSpec, accelerator: Accelerator, tensors: StepTensors
    ) -> None:
        wrapper = library.BatchDecodeWithPagedKVCacheWrapper(
            workspaces.floats,
            _LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=True,
            paged_kv_indptr_buffer=tensors.pages.indptr,
            paged_kv_indices_buffer=tensors.pages.indices,
            paged_kv_last_page_len_buffer=tensors.pages.last_page_len,
            backend="fa2",
        )
        wrapper.reset_workspace_buffer(workspaces.floats, workspaces.graph_schedule(spec, 0))
        super().__init__(wrapper, spec, accelerator)
        self._library = library
        self._is_planned = False

    def _plan(self, tensors: StepTensors, kv: DeviceKV) -> None:
        pages = tensors.pages
        where = (pages.indptr_host, _used(pages), pages.last_page_len_host)
        if self._is_planned:
            # What the buffers need is in them already: the wrappers read the memory that the step was copied to.
            self._library.fast_decode_plan(
                self._wrapper, *where, *self._shape(kv), **self._kind(kv), global_override_indptr_cpu=pages.indptr_host
            )
        else:
            self._wrapper.plan(*where, *self._shape(kv), **self._kind(kv))
            self._is_planned = True


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What all layers of a step share.

    Attributes:
        tensors: The step; a graph's are those that it was captured with.
        kinds: What attends, by kind of layer.
        kv: The pages.
    """

    tensors: StepTensors
    kinds: Mapping[AttnSpec, PlannedAttention]
    kv: DeviceKV


class AttentionPlanner:
    """Makes plans, over one set of wrappers for each kind of attention layer.

    Args:
        library: FlashInfer, or what stands for it.
        accelerator: Where it computes.
        num_float_bytes: Of the workspace that all wrappers share.
    """

    def __init__(self, library: Any, accelerator: Accelerator, num_float_bytes: int) -> None:
        self._library = library
        self._accelerator = accelerator
        self._workspaces = Workspaces(accelerator.device, num_float_bytes)
        self._eager: dict[tuple[AttnSpec, bool], PlannedAttention] = {}
        self._graphs: dict[tuple[int, bool], StepPlan] = {}

    def plan(self, tensors: StepTensors, kv: DeviceKV) -> StepPlan:
        """Plan a step that is computed once, kernel by kernel."""
        kinds = {spec: self._eager_attention(spec, tensors.shared is not None) for spec in kv.kinds}
        return _planned(StepPlan(tensors, kinds, kv), tensors)

    def plan_graph(self, tensors: StepTensors, kv: DeviceKV) -> StepPlan:
        """Plan a decode step that is captured or replayed: the same plan for the same size, with new contents."""
        assert tensors.num_tokens == tensors.num_reqs, "graphs are captured of decode steps alone"
        key = (tensors.num_reqs, tensors.shared is not None)
        known = self._graphs.get(key)
        if known is None or known.kv is not kv:
            known = self._graphs[key] = self._graph_plan(tensors, kv)
        assert _addresses(known.tensors) == _addresses(tensors), "a graph's step has always the same memory"
        return _planned(known, tensors)

    def _eager_attention(self, spec: AttnSpec, is_shared: bool) -> PlannedAttention:
        key = (spec, is_shared)
        if key not in self._eager:
            kind = EagerCascade if is_shared else EagerAttention
            self._eager[key] = kind(self._library, self._workspaces, spec, self._accelerator)
        return self._eager[key]

    def _graph_plan(self, tensors: StepTensors, kv: DeviceKV) -> StepPlan:
        kind = GraphDecode if tensors.shared is None else GraphCascade
        kinds = {spec: kind(self._library, self._workspaces, spec, self._accelerator, tensors) for spec in kv.kinds}
        return StepPlan(tensors, kinds, kv)


def _planned(plan: StepPlan, tensors: StepTensors) -> StepPlan:
    for attention in plan.kinds.values():
        attention.plan(tensors, plan.kv)
    return plan


def _levels(tensors: StepTensors) -> tuple[CsrPages, CsrPages]:
    assert tensors.shared is not None
    return tensors.shared, tensors.pages


def _used(pages: CsrPages) -> torch.Tensor:
    """A graph's indices are as long as its buffer, whose contents grow from step to step."""
    return pages.indices[: int(pages.indptr_host[-1])]


def _addresses(tensors: StepTensors) -> list[int]:
    views = [tensors.qo_indptr, tensors.batch_indices, tensors.append_positions]
    for pages in (tensors.pages, tensors.shared):
        views += [] if pages is None else [pages.indptr, pages.indices, pages.last_page_len]
    return [view.data_ptr() for view in views]
