"""What the fake FlashInfer's paged wrappers share: buffers, what was planned, and the launch that reads both.

A launch reads the device's buffers and the last plan when it runs, which in a graph is at each replay, as the real
kernels read their integer workspace; scale, window and cap are arguments of the launch, and stay as captured.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import torch

from kernels.accelerator import Accelerator
from kernels.testing import fake_checks as checks
from kernels.testing.device_calls import device_call, is_capturing
from kernels.testing.fake_attention import AttentionKind, PagedBatch, attend_paged
from kernels.testing.fake_checks import MisuseError, demand
from kernels.testing.fake_plan import HeadShape, Planned, check_planned

_PLAN_NUMBERS = count(1)  # what stands for a schedule in the int workspace


class PagedWrapper:
    """A wrapper's memory and its launches. Subclasses have the real classes' signatures."""

    accelerator: Accelerator | None = None  # FakeFlashInfer sets it on its own subclasses

    def _init_paged(
        self, workspace: torch.Tensor, kv_layout: str, use_cuda_graph: bool, buffers: Sequence[torch.Tensor | None]
    ) -> None:
        """Take the memory.

        Args:
            workspace: Float workspace.
            kv_layout: "NHD".
            use_cuda_graph: Keep to the buffers.
            buffers: qo_indptr, kv_indptr, kv_indices, last_page_len; all None without graphs.
        """
        checks.check_workspace("float_workspace_buffer", workspace)
        demand(kv_layout == "NHD", f"kv_layout {kv_layout!r}: the modules are built for NHD")
        self.device = workspace.device
        self._workspace = workspace
        self._use_cuda_graph = use_cuda_graph
        self._planned: Planned | None = None
        self._staging: torch.Tensor | None = None
        self._int_workspace = torch.zeros(1, dtype=torch.int32)  # what there is of it: the plan's number
        self._int_bytes = 8 << 20
        self._plan_number = 0
        self._fixed_batch_size = 0
        self._batch: PagedBatch | None = None
        if use_cuda_graph:
            self._take_buffers(buffers)
        else:
            demand(all(x is None for x in buffers), "buffers are for use_cuda_graph=True")  # ignored there

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the wrapper keeps to its buffers."""
        return self._use_cuda_graph

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Take other memory. Wrappers may share it whose plans are run before another of them is planned."""
        checks.check_workspace("float_workspace_buffer", float_workspace_buffer)
        checks.check_workspace("int_workspace_buffer", int_workspace_buffer)
        self._workspace = float_workspace_buffer
        self._int_workspace = int_workspace_buffer[:4].view(torch.int32)
        self._int_bytes = int_workspace_buffer.numel()
        self._staging, self._planned = None, None  # the last plan's schedule lies in the other memory

    def _take_buffers(self, buffers: Sequence[torch.Tensor | None]) -> None:
        names = ("qo_indptr_buf", "paged_kv_indptr_buf", "paged_kv_indices_buf", "paged_kv_last_page_len_buf")
        taken = []
        for name, x in zip(names, buffers, strict=True):
            if x is None:
                raise MisuseError(f"{name} should be a tensor in CUDA graph mode")  # prefill.py, decode.py
            checks.check_int32(name, x)
            taken.append(x)
        qo, kv, indices, last = taken
        self._fixed_batch_size = len(last)
        fits = len(qo) == len(kv) == len(last) + 1 and len(last) > 0
        demand(fits, f"buffers of {len(qo)} and {len(kv)} offsets for {len(last)} requests")
        self._batch = PagedBatch(qo, kv, indices, last)

    def _device_buffers(self) -> list[torch.Tensor]:
        """Return what is known to lie on the device."""
        batch = self._batch
        if batch is None or not self._use_cuda_graph:
            return []
        return [batch.qo_indptr, batch.kv_indptr, batch.kv_indices, batch.last_page_len]

    def planned_or_raise(self) -> Planned:
        """Return what was planned last."""
        if self._planned is None:
            raise MisuseError("run() before plan()")
        return self._planned

    def pages_read(self) -> set[int]:
        """Return the page ids that a launch would read now."""
        planned, batch = self.planned_or_raise(), self._batch
        return set() if batch is None else set(batch.kv_indices[: planned.kv[-1]].tolist())

    def _begin_plan(self) -> None:
        demand(not is_capturing(), "plan() inside a graph capture: a replay would not plan again")

    def _end_plan(self, planned: Planned) -> None:
        """Stage the plan as scheduler.cuh does: fill the wrapper's ONE pinned buffer and queue its copy to the device.

        So the accelerator raises at the next plan where the host has not waited for an event after this one.
        """
        self._plan_number = next(_PLAN_NUMBERS)
        if self.accelerator is None:
            self._int_workspace.fill_(self._plan_number)
        else:
            if self._staging is None:
                self._staging = self.accelerator.pinned(1)
            self._staging.fill_(self._plan_number)
            self.accelerator.upload(self._staging, self._int_workspace)
        self._planned = planned

    def _check_planned(self, planned: Planned) -> None:
        sizes = {"float_bytes": self._workspace.numel(), "int_bytes": self._int_bytes}
        check_planned(planned, **sizes, in_graph=self._use_cuda_graph)

    def _store(self, planned: Planned, indices: torch.Tensor) -> None:
        """Bring a plan's arrays to the device: into the buffers, or as new tensors."""
        if not self._use_cuda_graph:
            qo, kv, last = (torch.tensor(x, dtype=torch.int32) for x in (planned.qo, planned.kv, planned.last))
            self._batch = PagedBatch(qo, kv, indices, last)
            return
        batch = self._buffers(planned, indices)
        batch.qo_indptr.copy_(torch.tensor(planned.qo))
        batch.kv_indptr.copy_(torch.tensor(planned.kv))
        batch.last_page_len.copy_(torch.tensor(planned.last))
        batch.kv_indices[: len(indices)].copy_(indices)

    def _buffers(self, planned: Planned, indices: torch.Tensor) -> PagedBatch:
        """Return the graph's buffers, which the plan must fit."""
        batch, size = self._batch, len(planned.last)
        if batch is None:
            raise MisuseError("no buffers")
        fixed = self._fixed_batch_size
        demand(size == fixed, f"The batch size should be fixed in cudagraph mode: {size}, buffers are for {fixed}")
        room = len(batch.kv_indices)
        demand(len(indices) <= room, f"{len(indices)} page ids exceed the allocated buffer of {room}")
        return batch

    def _run(
        self,
        q: torch.Tensor,
        pool: object,
        *,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        window_left: int | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Check and launch: [T, num_qo_heads, head_dim] in q's dtype, and log-sum-exp [T, num_qo_heads] fp32."""
        planned = self.planned_or_raise()
        self._check_q(q, planned)
        shape = planned.shape
        pages = checks.check_pool(pool, shape.page_size, shape.num_kv_heads, shape.head_dim, shape.kv_dtype)
        same = window_left is None or window_left == planned.kind.window_left
        demand(same, f"window_left {window_left}, planned {planned.kind.window_left}")  # asserted there
        self._check_results(q, out, lse)
        computed, computed_lse = device_call(self._launch, q, pages, planned.kind, shape)
        if out is not None:
            computed = out.copy_(computed)
        if lse is not None:
            computed_lse = lse.copy_(computed_lse)
        return computed, computed_lse

    def _check_q(self, q: torch.Tensor, planned: Planned) -> None:
        shape = planned.shape
        demand(q.dtype == shape.q_dtype, f"q is {q.dtype}, planned {shape.q_dtype} (plan's default is float16)")
        demand(q.ndim == 3, f"q must be [T, heads, head_dim], has {q.ndim} dimensions")
        rows = planned.qo[-1]
        demand(q.shape[0] == rows, f"q.shape[0] ({q.shape[0]}) does not match qo_indptr[-1] ({rows})")
        heads = (shape.num_qo_heads, shape.head_dim)
        demand(tuple(q.shape[1:]) == heads, f"q is {tuple(q.shape)}, planned {heads}")  # strides only: unchecked there
        checks.check_vector_loads("q", q)

    def _check_results(self, q: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None) -> None:
        if out is not None:
            fits = out.shape == q.shape and out.dtype == q.dtype and out.is_contiguous()
            demand(fits, f"out is {tuple(out.shape)} {out.dtype}, q {tuple(q.shape)} {q.dtype}")
            demand(not checks.overlaps(out, q), "out overlaps q")
        if lse is not None:
            fits = lse.shape == q.shape[:2] and lse.dtype == torch.float32 and lse.is_contiguous()
            demand(fits, f"lse is {tuple(lse.shape)} {lse.dtype}")

    def _launch(
        self, q: torch.Tensor, pool: torch.Tensor, kind: AttentionKind, shape: HeadShape
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The kernel: reads buffers and the last plan now; ``kind`` and ``shape`` as they were when it was launched."""
        planned, batch = self.planned_or_raise(), self._batch
        assert batch is not None
        own = int(self._int_workspace) == self._plan_number
        demand(own, "the int workspace holds another wrapper's schedule, planned since")  # unchecked there
        demand(kind == planned.kind, f"captured with {kind}, planned with {planned.kind} since")
        demand(shape == planned.shape, f"captured with {shape}, planned with {planned.shape} since")
        demand(q.shape[0] == planned.qo[-1], f"captured with {q.shape[0]} rows, planned {planned.qo[-1]}")
        self._check_buffers(batch, planned)
        checks.check_page_ids(batch.kv_indices, planned.kv, pool.shape[0])
        out, lse = attend_paged(q, pool, batch, kind)
        return out.to(q.dtype), lse

    def _check_buffers(self, batch: PagedBatch, planned: Planned) -> None:
        """Kernels take lengths from the buffers and the cut into parts from the plan: they must agree."""
        for name, x, told in (
            ("qo_indptr", batch.qo_indptr, planned.qo),
            ("kv_indptr", batch.kv_indptr, planned.kv),
            ("last_page_len", batch.last_page_len, planned.last),
        ):
            holds = x.tolist()
            demand(holds == told, f"{name} on the device is {holds[:8]}, the last plan says {told[:8]}")
