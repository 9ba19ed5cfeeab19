"""The seam between the engine and the machine: what a backend must offer, and the registry of backends.

Knows tensors and pages; knows nothing of requests, models or HTTP. "Page" is this package's word for a KV block.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import torch

from kernels.accelerator import Accelerator
from kernels.device_step import StepTensors
from kernels.fused import FusedKernels, ModelSpec
from kernels.step import Activation, AttnSpec, IntArray, KVPool, StepMeta

__all__ = [
    "Accelerator",
    "Activation",
    "AttnSpec",
    "Backend",
    "BackendOptions",
    "DeviceBackend",
    "IntArray",
    "KVPool",
    "NoKernelsError",
    "NotFusableError",
    "StepMeta",
    "StepTensors",
    "UnavailableBackendError",
    "UnsupportedModelError",
    "UnusableIsaError",
    "backend_names",
    "create_backend",
]


class NotFusableError(Exception):
    """The backend has no whole-step kernels for a model; says why, as the end of a sentence."""


class NoKernelsError(NotFusableError):
    """The backend has no whole-step kernels for any model, as it has told already, or was told itself."""


class UnusableIsaError(ValueError):
    """The instruction set that was asked for cannot be used; the message lists those that can."""


class UnavailableBackendError(ValueError):
    """The backend cannot compute on this machine; the message says what is missing."""


class UnsupportedModelError(ValueError):
    """The backend cannot compute such a model at all; the message says what it can, as a sentence without a stop."""


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """What a backend may be told; each takes what concerns it.

    Attributes:
        cpu_isa: auto, torch, or an instruction set of kernels.cpu_library.ISAS.
        num_threads: Compute threads; 0 = as many as this process may use.
        cache_dir: Where kernels are built; None = the user's cache.
    """

    cpu_isa: str = "auto"
    num_threads: int = 0
    cache_dir: Path | None = None


class Backend(Protocol):
    """What the one decoder and the runner need of a machine. All tensors are torch tensors on ``device``.

    Methods with a trailing underscore write into their arguments. Shapes: T tokens, H hidden size.
    """

    name: str
    device: str
    page_sizes: tuple[int, ...]
    default_dtype: torch.dtype  # what weights and KV are best computed in here

    def alloc_kv(
        self, layer_specs: Sequence[AttnSpec], *, num_pages: int, page_size: int, dtype: torch.dtype
    ) -> KVPool:
        """Allocate pages for one layer per entry of ``layer_specs``."""

    def kv_page_bytes(self, layer_specs: Sequence[AttnSpec], *, page_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of one page over all layers, without allocating."""

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
        """Take a [out, in] weight and optional [out] bias into the backend's own form, once, at load."""

    def linear(self, x: torch.Tensor, packed: Any) -> torch.Tensor:
        """Return ``x @ weight.T + bias``: [T, in] -> [T, out]."""

    def rmsnorm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return ``x / rms(x) * weight``, computed in fp32: [T, H] -> [T, H], x's dtype; weight's is that or fp32."""

    def add_rmsnorm_(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """``residual += x; x = rmsnorm(residual)`` in place, both [T, H] (FlashInfer's semantics)."""

    def qk_norm_rope_(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        cos_sin: torch.Tensor,
        eps: float,
    ) -> None:
        """Norm each head of q and k (where weights are given), then rotate halves, in place.

        Args:
            q: [T, num_q_heads, head_dim].
            k: [T, num_kv_heads, head_dim].
            q_weight: [head_dim] or None (no norm).
            k_weight: [head_dim] or None.
            cos_sin: [T, head_dim] fp32, this step's rows of the table: cos of head_dim/2 angles, then their sin.
            eps: Of the norm.
        """

    def plan(self, meta: StepMeta, kv: KVPool) -> Any:
        """Prepare what all layers of this step share. Called once a step, before ``attention``."""

    def attention(
        self, plan: Any, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: KVPool
    ) -> torch.Tensor:
        """Append k and v at the step's slots, then attend causally over each request's pages.

        Args:
            plan: From ``plan`` of the same step and pool.
            layer: Index into the pool's layers; fixes the AttnSpec.
            q: [T, num_q_heads, head_dim].
            k: [T, num_kv_heads, head_dim].
            v: [T, num_kv_heads, head_dim].
            kv: The pool.

        Returns:
            [T, num_q_heads * head_dim], q's dtype. All writes of the step precede all reads.
        """

    def act_mul(self, x: torch.Tensor, kind: Activation) -> torch.Tensor:
        """Return ``act(x[:, :I]) * x[:, I:]``: [T, 2*I] -> [T, I]."""

    def fuse(self, spec: ModelSpec) -> FusedKernels:
        """Return kernels that compute the whole step of such a model in one call, in bf16.

        Raises:
            NotFusableError: There are none: compute it layer by layer with the methods above.
        """


class DeviceBackend(Backend, Protocol):
    """A Backend whose tensors live on an accelerator that computes beside the host.

    Its ``plan`` takes any step by itself, eagerly. The runner, which lays a step out in one block, uses these.
    """

    accelerator: Accelerator

    def check(self, layer_specs: Sequence[AttnSpec], dtype: torch.dtype) -> None:
        """Refuse a model that this backend, or this card, has no kernels for. ``alloc_kv`` does so too.

        Args:
            layer_specs: One per layer.
            dtype: Of its weights, hidden states and KV.

        Raises:
            UnsupportedModelError: There are none.
        """

    def graph_sizes(self, max_num_reqs: int) -> tuple[int, ...]:
        """Return the batch sizes, ascending, that decoding is captured for: none above ``max_num_reqs``."""

    def num_shared_pages(self, meta: StepMeta, kv: KVPool) -> int:
        """Return how many leading pages to attend to once for all requests; 0 = no cascade."""

    def plan_step(self, tensors: StepTensors, kv: KVPool, *, in_graph: bool) -> Any:
        """Prepare what all layers of this step share. Called once a step, before it is computed or replayed.

        Args:
            tensors: The step. Within a graph they are always the same memory for one batch size, with or without
                ``shared``.
            kv: Its pages.
            in_graph: The step decodes and is captured, or replayed: what is returned stays good for later replays, and
                this call renews it.
        """


# Lazy on purpose: naming a backend must not import the others' dependencies.
_FACTORIES: dict[str, str] = {
    "torch": "kernels.torch_backend:create_backend",
    "cpu": "kernels.cpu_backend:create_backend",
    "cuda": "kernels.flashinfer_backend:create_backend",
}


def backend_names() -> tuple[str, ...]:
    """Return the names that ``create_backend`` takes."""
    return tuple(_FACTORIES)


def create_backend(name: str, options: BackendOptions | None = None) -> Backend:
    """Create the backend called ``name``.

    Args:
        name: One of backend_names().
        options: None = all defaults.

    Raises:
        UnavailableBackendError: This machine has not what the backend computes on.
        UnusableIsaError: ``options.cpu_isa`` cannot be used here.
        ValueError: The name is not registered; the message lists those that are.
    """
    if name not in _FACTORIES:
        raise ValueError(f"unknown backend {name!r}; known: {', '.join(_FACTORIES)}")
    module, _, factory = _FACTORIES[name].partition(":")
    create = cast(Callable[[BackendOptions], Backend], getattr(importlib.import_module(module), factory))
    return create(options or BackendOptions())
