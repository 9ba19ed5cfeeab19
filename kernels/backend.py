"""The seam between the engine and the machine: what a backend must offer, and the registry of backends.

Knows tensors and pages; knows nothing of requests, models or HTTP. "Page" is this package's word for a KV block.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray

Activation = Literal["silu", "gelu_tanh"]
IntArray = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class AttnSpec:
    """What distinguishes one kind of attention layer from another.

    Attributes:
        num_q_heads: Query heads; a multiple of ``num_kv_heads`` (grouped-query attention).
        num_kv_heads: Key and value heads.
        head_dim: Width of one head.
        sm_scale: Factor on q·k before the softmax.
        window_left: Tokens visible to the left of the query, itself not counted; -1 = all (FlashInfer's meaning).
        soft_cap: ``cap * tanh(score / cap)`` on the scaled scores; 0 = off.
    """

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    sm_scale: float
    window_left: int = -1
    soft_cap: float = 0.0


@dataclass(slots=True)
class StepMeta:
    """One forward step over a ragged batch, in host int32 arrays. ``B`` requests, ``T`` tokens.

    Request ``i`` owns the tokens ``qo_indptr[i]:qo_indptr[i+1]`` and the pages
    ``kv_indices[kv_indptr[i]:kv_indptr[i+1]]``; its queries are the last ``q_len`` of its ``kv_lens[i]`` tokens::

        pages of request i   [ p0 | p1 | p2 ]          kv_len = (3 - 1) * page_size + last_page_len
        tokens                ......qqqq               q_len = 4, positions kv_len-4 .. kv_len-1

    Attributes:
        num_reqs: B. Requests with one query token (decodes) come first.
        num_tokens: T.
        num_decodes: How many of the first requests have ``q_len == 1``.
        max_q_len: Longest query of the batch.
        max_kv_len: Longest context of the batch.
        qo_indptr: [B+1], token units.
        kv_indptr: [B+1], page units.
        kv_indices: [kv_indptr[-1]], page ids.
        last_page_len: [B], 1..page_size.
        kv_lens: [B], tokens including this step's.
        token_ids: [T].
        positions: [T].
        slot_mapping: [T], ``page * page_size + offset`` where this token's K and V go.
        logit_rows: [R], token rows whose logits are wanted.
    """

    num_reqs: int
    num_tokens: int
    num_decodes: int
    max_q_len: int
    max_kv_len: int
    qo_indptr: IntArray
    kv_indptr: IntArray
    kv_indices: IntArray
    last_page_len: IntArray
    kv_lens: IntArray
    token_ids: IntArray
    positions: IntArray
    slot_mapping: IntArray
    logit_rows: IntArray


class KVPool(Protocol):
    """Pages of K and V for every layer. Opaque: the layout belongs to the backend, callers know only page ids."""

    page_size: int
    num_pages: int
    page_bytes: int  # one page over all layers, K and V

    def copy_pages(self, src: IntArray, dst: IntArray) -> None:
        """Copy whole pages, all layers. ``src`` and ``dst``: [n] page ids, disjoint."""

    def read_page(self, page: int, out: memoryview) -> None:
        """Write one page's native bytes into ``out`` (``page_bytes`` long)."""

    def write_page(self, page: int, data: memoryview) -> None:
        """Fill one page from bytes that ``read_page`` of the same kind of pool gave."""


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


# Lazy on purpose: naming a backend must not import the others' dependencies.
_FACTORIES: dict[str, str] = {
    "torch": "kernels.torch_backend:create_backend",
    "cpu": "kernels.cpu_backend:create_backend",
}


def backend_names() -> tuple[str, ...]:
    """Return the names that ``create_backend`` takes."""
    return tuple(_FACTORIES)


def create_backend(name: str) -> Backend:
    """Create the backend called ``name``.

    Raises:
        ValueError: The name is not registered; the message lists those that are.
    """
    if name not in _FACTORIES:
        raise ValueError(f"unknown backend {name!r}; known: {', '.join(_FACTORIES)}")
    module, _, factory = _FACTORIES[name].partition(":")
    return cast(Callable[[], Backend], getattr(importlib.import_module(module), factory))()
