"""The reference backend as a DeviceBackend: it reads a step's tensors when it computes, hence at each replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kernels.accelerator import Accelerator
from kernels.device_step import StepTensors
from kernels.paged_kv import PagedKV
from kernels.step import KVPool, StepMeta
from kernels.testing.device_calls import device_call
from kernels.torch_backend import TorchBackend, TorchPlan


class TorchDeviceBackend(TorchBackend):
    """Computes as the reference does, from what lies on the device.

    Args:
        accelerator: The device.
        sizes: Batch sizes for graphs.
        min_shared_reqs: A batch of so many has its shared pages apart.

    Attributes:
        plans: Of each planned step: batch size, shared pages, whether it is in a graph.
    """

    def __init__(
        self, accelerator: Accelerator, *, sizes: Sequence[int] = (1, 2, 4, 8), min_shared_reqs: int = 3
    ) -> None:
        super().__init__()
        self.accelerator = accelerator
        self.plans: list[tuple[int, int, bool]] = []
        self._sizes = sizes
        self._min_shared_reqs = min_shared_reqs

    def graph_sizes(self, max_num_reqs: int) -> tuple[int, ...]:
        return tuple(size for size in self._sizes if size <= max_num_reqs)

    def num_shared_pages(self, meta: StepMeta, kv: KVPool) -> int:
        return meta.num_common_pages if meta.num_reqs >= self._min_shared_reqs else 0

    def plan_step(self, tensors: StepTensors, kv: KVPool, *, in_graph: bool) -> StepTensors:
        num_shared = int(tensors.shared.indptr_host[1]) if tensors.shared else 0
        self.plans.append((tensors.num_reqs, num_shared, in_graph))
        return tensors

    def attention(
        self, plan: Any, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: KVPool
    ) -> torch.Tensor:
        if isinstance(plan, TorchPlan):
            return super().attention(plan, layer, q, k, v, kv)
        return device_call(self._attend_step, plan, layer, q, k, v, kv)

    def _attend_step(
        self, tensors: StepTensors, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: PagedKV
    ) -> torch.Tensor:
        return super().attention(read_plan(tensors, kv.page_size), layer, q, k, v, kv)


def read_plan(tensors: StepTensors, page_size: int) -> TorchPlan:
    """Put together from a step's device tensors what the reference would plan."""
    indptr, qo_indptr = tensors.pages.indptr.tolist(), tensors.qo_indptr.tolist()
    shared: list[int] = []
    if tensors.shared is not None:
        assert tensors.shared_qo_indptr is not None
        assert tensors.shared_qo_indptr.tolist() == [0, tensors.num_tokens]
        assert tensors.shared.last_page_len.tolist() == [page_size]
        shared = tensors.shared.indices[: tensors.shared.indptr.tolist()[1]].tolist()
    slots = torch.empty(tensors.num_tokens, dtype=torch.int64)
    for token, (request, at) in enumerate(
        zip(tensors.batch_indices.tolist(), tensors.append_positions.tolist(), strict=True)
    ):
        page = int(tensors.pages.indices[indptr[request] + at // page_size])
        slots[token] = page * page_size + at % page_size
    requests = []
    for index, last in enumerate(tensors.pages.last_page_len.tolist()):
        own = tensors.pages.indices[indptr[index] : indptr[index + 1]].tolist()
        kv_len = (len(shared) + len(own) - 1) * page_size + last
        requests.append((slice(qo_indptr[index], qo_indptr[index + 1]), torch.tensor([*shared, *own]), kv_len))
    return TorchPlan(slots, tuple(requests))
