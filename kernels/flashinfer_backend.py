"""The cuda backend: FlashInfer's kernels for attention, norms, rope and activation, cuBLAS for linears.

FlashInfer is handed in, here and in kernels/flashinfer_plans.py, so that a stand-in computes the same on a CPU; only
create_backend() imports it. Everything is queued on one stream, and nothing waits for the device but for plan()'s
staging memory.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from kernels.accelerator import Accelerator
from kernels.backend import (
    Activation,
    AttnSpec,
    BackendOptions,
    KVPool,
    NoKernelsError,
    StepMeta,
    StepTensors,
    UnavailableBackendError,
)
from kernels.cuda import CudaAccelerator, NoDeviceError
from kernels.device_kv import DeviceKV
from kernels.flashinfer_norms import Norms
from kernels.flashinfer_plans import FLOAT_WORKSPACE_BYTES, AttentionPlanner, StepPlan
from kernels.flashinfer_support import check_model, graph_sizes, num_shared_pages
from kernels.fused import FusedKernels, ModelSpec
from kernels.paged_kv import page_bytes
from kernels.step_upload import upload_step

_FIRST_ROW_IDS = 16384


class DenseLinear(NamedTuple):
    """A linear layer's parameters on the device: weight [out, in], bias [out] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None


class FlashInferBackend:
    """A DeviceBackend over FlashInfer.

    Args:
        flashinfer: The library, or what stands for it.
        accelerator: Where it computes.
        num_workspace_bytes: Device memory for attention's partial results.
    """

    def __init__(
        self, *, flashinfer: Any, accelerator: Accelerator, num_workspace_bytes: int = FLOAT_WORKSPACE_BYTES
    ) -> None:
        self.name = "cuda"
        self.accelerator = accelerator
        self.device = str(accelerator.device)
        self.page_sizes: tuple[int, ...] = (16, 32, 64)
        self.default_dtype = torch.bfloat16
        self._flashinfer = flashinfer
        self._norms = Norms(flashinfer)
        self._num_workspace_bytes = num_workspace_bytes
        self._planner = AttentionPlanner(flashinfer, accelerator, num_workspace_bytes)
        self._row_ids = [self._build_row_ids(_FIRST_ROW_IDS)]

    def check(self, layer_specs: Sequence[AttnSpec], dtype: torch.dtype) -> None:
        """Refuse a model that there are no kernels for; see DeviceBackend."""
        check_model(layer_specs, dtype, self.accelerator.capability)

    def alloc_kv(
        self, layer_specs: Sequence[AttnSpec], *, num_pages: int, page_size: int, dtype: torch.dtype
    ) -> DeviceKV:
        """Allocate zeroed pages for one layer per entry of ``layer_specs``.

        Raises:
            UnsupportedModelError: See check().
            ValueError: ``page_size`` is not one of ``page_sizes``.
        """
        self.check(layer_specs, dtype)
        self._check_page_size(page_size)
        return DeviceKV(
            layer_specs, num_pages=num_pages, page_size=page_size, dtype=dtype, device=self.accelerator.device
        )

    def kv_page_bytes(self, layer_specs: Sequence[AttnSpec], *, page_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of one page over all layers, without allocating; refuses what alloc_kv() refuses."""
        self.check(layer_specs, dtype)
        self._check_page_size(page_size)
        return page_bytes(layer_specs, page_size=page_size, dtype=dtype)

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> DenseLinear:
        """Keep weight, [out, in], and bias, [out] or None, as they are, on the device."""
        device = self.accelerator.device
        return DenseLinear(weight.to(device), None if bias is None else bias.to(device))

    def linear(self, x: torch.Tensor, packed: DenseLinear) -> torch.Tensor:
        """Return ``x @ weight.T + bias``: [T, in] -> [T, out]."""
        return F.linear(x, packed.weight, packed.bias)

    def rmsnorm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return ``x / rms(x) * weight`` over the last dimension, computed in fp32, x's dtype."""
        out = torch.empty_like(x)
        self._norms.norm_into(out, x, weight, eps)
        return out

    def add_rmsnorm_(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """``residual += x; x = rmsnorm(residual)`` in place, both [T, H]."""
        self._norms.add_norm_(x, residual, weight, eps)

    def qk_norm_rope_(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        cos_sin: torch.Tensor,
        eps: float,
    ) -> None:
        """Norm each head of q and k where weights are given, then rotate halves, in place; see Backend.

        q and k may be views of one projection: the kernels take any distance between tokens.
        """
        for heads, weight in ((q, q_weight), (k, k_weight)):
            if weight is not None:
                self._norms.norm_into(heads, heads, weight, eps)
        num_tokens, _, head_dim = q.shape
        # ``cos_sin`` has this step's rows already, so a token's row in it is its row in the batch.
        self._flashinfer.apply_rope_with_cos_sin_cache_inplace(
            self._token_rows(num_tokens), q.view(num_tokens, -1), k.view(num_tokens, -1), head_dim, cos_sin
        )

    def plan(self, meta: StepMeta, kv: KVPool) -> StepPlan:
        """Put any step on the device and prepare what its layers share. Its copies wait for the device."""
        num_shared = self.num_shared_pages(meta, kv)
        tensors = upload_step(meta, page_size=kv.page_size, num_shared_pages=num_shared, device=self.accelerator.device)
        return self.plan_step(tensors, kv, in_graph=False)

    def attention(
        self, plan: StepPlan, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: KVPool
    ) -> torch.Tensor:
        """Append k and v, then attend: [T, num_q_heads * head_dim]; see Backend."""
        assert isinstance(kv, DeviceKV)
        step, pages = plan.tensors, kv.layers[layer]
        self._flashinfer.append_paged_kv_cache(
            k,
            v,
            step.batch_indices,
            step.append_positions,
            pages,
            step.pages.indices,
            step.pages.indptr,
            step.pages.last_page_len,
        )
        return plan.kinds[kv.layer_specs[layer]].attend(q, pages).flatten(1)

    def act_mul(self, x: torch.Tensor, kind: Activation) -> torch.Tensor:
        """Return ``act(x[:, :I]) * x[:, I:]``, computed in fp32: [T, 2*I] -> [T, I], x's dtype."""
        activate = self._flashinfer.silu_and_mul if kind == "silu" else self._flashinfer.gelu_tanh_and_mul
        out: torch.Tensor = activate(x)
        return out

    def fuse(self, spec: ModelSpec) -> FusedKernels:
        """Refuse: a graph replays the whole step, made of the methods above."""
        raise NoKernelsError("the cuda backend computes layer by layer, and replays that as one graph")

    def graph_sizes(self, max_num_reqs: int) -> tuple[int, ...]:
        """Return the batch sizes, ascending, that decoding is captured for."""
        return graph_sizes(max_num_reqs)

    def num_shared_pages(self, meta: StepMeta, kv: KVPool) -> int:
        """Return how many leading pages to attend to once for all requests; 0 = no cascade."""
        assert isinstance(kv, DeviceKV)
        return num_shared_pages(meta, kv.kinds, kv.page_size, self._num_workspace_bytes)

    # A wrapper writes into buffers that an earlier plan made: all of them in inference mode, or torch refuses.
    @torch.inference_mode()
    def plan_step(self, tensors: StepTensors, kv: KVPool, *, in_graph: bool) -> StepPlan:
        """Prepare what all layers of this step share; see DeviceBackend."""
        assert isinstance(kv, DeviceKV)
        return self._planner.plan_graph(tensors, kv) if in_graph else self._planner.plan(tensors, kv)

    def _token_rows(self, num_tokens: int) -> torch.Tensor:
        """Return 0..num_tokens-1, int32, where it stays: graphs have its address, so outgrown ones are kept."""
        if num_tokens > len(self._row_ids[-1]):
            self._row_ids.append(self._build_row_ids(1 << (num_tokens - 1).bit_length()))
        return self._row_ids[-1][:num_tokens]

    def _build_row_ids(self, count: int) -> torch.Tensor:
        return torch.arange(count, dtype=torch.int32, device=self.accelerator.device)

    def _check_page_size(self, page_size: int) -> None:
        if page_size not in self.page_sizes:
            *most, last = map(str, self.page_sizes)
            raise ValueError(f"the cuda backend has pages of {', '.join(most)} or {last} tokens, not {page_size}")


def create_backend(options: BackendOptions | None = None) -> FlashInferBackend:
    """Create the backend on the first card. It has no options: CUDA_VISIBLE_DEVICES says which card that is.

    Raises:
        UnavailableBackendError: There is no card that can be used, or no FlashInfer.
    """
    try:
        accelerator = CudaAccelerator()
    except NoDeviceError as error:
        raise UnavailableBackendError(f"the cuda backend needs an NVIDIA card: {error}") from error
    # Its norms then come from a module that can be compiled ahead of time, not from a compiler of its own.
    os.environ.setdefault("FLASHINFER_USE_CUDA_NORM", "1")
    try:
        library = importlib.import_module("flashinfer")
    except (ImportError, OSError) as error:  # it makes its cache when it is imported
        raise UnavailableBackendError(f"the cuda backend needs flashinfer, and cannot import it: {error}") from error
    return FlashInferBackend(flashinfer=library, accelerator=accelerator)
