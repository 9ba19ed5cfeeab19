"""The reference backend: plain torch, slow, obviously right. Every kernel test compares with it.

Computes in fp32 whatever the dtype, one request after the other, so a row never depends on who shares the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F

from kernels.backend import Activation, AttnSpec, BackendOptions, KVPool, NoKernelsError, StepMeta
from kernels.fused import FusedKernels, ModelSpec
from kernels.paged_kv import PagedKV, page_bytes, to_index


def visible(q_len: int, kv_len: int, window_left: int) -> torch.Tensor:
    """Return which keys each query sees: bool [q_len, kv_len], causal, the last query on the last key.

    Draws as, for q_len 3, kv_len 5 and window_left -1 | 1::

        x x x . .  |  . x x . .
        x x x x .  |  . . x x .
        x x x x x  |  . . . x x
    """
    query_pos = torch.arange(kv_len - q_len, kv_len).unsqueeze(1)
    key_pos = torch.arange(kv_len)
    mask = key_pos <= query_pos
    return mask if window_left < 0 else mask & (key_pos >= query_pos - window_left)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttnSpec) -> torch.Tensor:
    """Return one request's attention, every step written out in fp32.

    Args:
        q: [q_len, num_q_heads, head_dim], the last q_len positions.
        k: [kv_len, num_kv_heads, head_dim].
        v: [kv_len, num_kv_heads, head_dim].
        spec: Scale, window and soft cap.

    Returns:
        [q_len, num_q_heads * head_dim], q's dtype.
    """
    group = spec.num_q_heads // spec.num_kv_heads
    keys = k.float().repeat_interleave(group, dim=1)
    values = v.float().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.float(), keys) * spec.sm_scale
    if spec.soft_cap:
        scores = spec.soft_cap * torch.tanh(scores / spec.soft_cap)
    scores.masked_fill_(~visible(q.shape[0], k.shape[0], spec.window_left), float("-inf"))
    out = torch.einsum("hqk,khd->qhd", torch.softmax(scores, dim=-1), values)
    return out.flatten(1).to(q.dtype)


class DenseLinear(NamedTuple):
    """A linear layer's parameters as they came: weight [out, in], bias [out] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None


# The fp32 product adds up a row in another order where a thread would have fewer rows than about 6 (measured).
_MIN_ROWS_PER_THREAD = 8


@dataclass(frozen=True, slots=True)
class TorchPlan:
    """A step, request by request.

    Attributes:
        slots: [T] int64, where each token's K and V go.
        requests: Per request its token rows, its page ids and its kv_len.
    """

    slots: torch.Tensor
    requests: tuple[tuple[slice, torch.Tensor, int], ...]


class TorchBackend:
    """A Backend without a single clever line. Any page size works; ``page_sizes`` lists the usual ones."""

    def __init__(self) -> None:
        self.name = "torch"
        self.device = "cpu"
        self.page_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128)
        self.default_dtype = torch.float32

    def alloc_kv(
        self, layer_specs: Sequence[AttnSpec], *, num_pages: int, page_size: int, dtype: torch.dtype
    ) -> PagedKV:
        """Allocate zeroed pages for one layer per entry of ``layer_specs``."""
        return PagedKV(layer_specs, num_pages=num_pages, page_size=page_size, dtype=dtype)

    def kv_page_bytes(self, layer_specs: Sequence[AttnSpec], *, page_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of one page over all layers, without allocating."""
        return page_bytes(layer_specs, page_size=page_size, dtype=dtype)

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> DenseLinear:
        """Keep weight, [out, in], and bias, [out] or None, as they are."""
        return DenseLinear(weight, bias)

    def linear(self, x: torch.Tensor, packed: DenseLinear) -> torch.Tensor:
        """Return ``x @ weight.T + bias``: [T, in] -> [T, out]. A row's bits do not depend on the others."""
        num_rows, num_padded = x.shape[0], _MIN_ROWS_PER_THREAD * torch.get_num_threads()
        if num_rows < num_padded:
            x = torch.cat((x, x.new_zeros(num_padded - num_rows, x.shape[1])))
        return F.linear(x, packed.weight, packed.bias)[:num_rows]

    def rmsnorm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return ``x / rms(x) * weight`` over the last dimension, computed in fp32, x's dtype."""
        return _rmsnorm_fp32(x.float(), weight, eps).to(x.dtype)

    def add_rmsnorm_(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """``residual += x; x = rmsnorm(residual)`` in place, both [T, H]."""
        residual.add_(x)
        x.copy_(self.rmsnorm(residual, weight, eps))

    def qk_norm_rope_(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        cos_sin: torch.Tensor,
        eps: float,
    ) -> None:
        """Norm each head of q and k where weights are given, then rotate halves, in place; see Backend."""
        cos, sin = cos_sin.float().unsqueeze(1).chunk(2, dim=-1)
        for x, weight in ((q, q_weight), (k, k_weight)):
            heads = x.float() if weight is None else _rmsnorm_fp32(x.float(), weight, eps)
            low, high = heads.chunk(2, dim=-1)
            x.copy_(torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1))

    def plan(self, meta: StepMeta, kv: KVPool) -> TorchPlan:
        """Cut the step into requests."""
        pages = to_index(meta.kv_indices)
        tokens, page_bounds = meta.qo_indptr.tolist(), meta.kv_indptr.tolist()
        requests = tuple(
            (slice(tokens[i], tokens[i + 1]), pages[page_bounds[i] : page_bounds[i + 1]], int(meta.kv_lens[i]))
            for i in range(meta.num_reqs)
        )
        return TorchPlan(to_index(meta.slot_mapping), requests)

    def attention(
        self, plan: TorchPlan, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: KVPool
    ) -> torch.Tensor:
        """Append k and v, then attend token by token: [T, num_q_heads * head_dim]; see Backend.

        Each token's sums are its own, so that their order, hence its bits, cannot depend on the chunk it came in.
        """
        assert isinstance(kv, PagedKV)
        kv.append(layer, plan.slots, k, v)
        out = torch.empty_like(q).flatten(1)
        for rows, pages, kv_len in plan.requests:
            keys, values = kv.gather(layer, pages)
            for row in range(rows.start, rows.stop):
                num_seen = kv_len - (rows.stop - 1 - row)
                out[row] = attend(q[row : row + 1], keys[:num_seen], values[:num_seen], kv.layer_specs[layer])
        return out

    def act_mul(self, x: torch.Tensor, kind: Activation) -> torch.Tensor:
        """Return ``act(x[:, :I]) * x[:, I:]``, computed in fp32: [T, 2*I] -> [T, I], x's dtype."""
        gate, up = x.float().chunk(2, dim=-1)
        activated = F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")
        return (activated * up).to(x.dtype)

    def fuse(self, spec: ModelSpec) -> FusedKernels:
        """Refuse: the reference computes step by step."""
        raise NoKernelsError("the torch backend is the reference, which computes layer by layer")


def _rmsnorm_fp32(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps) * weight.float()


def create_backend(options: BackendOptions | None = None) -> TorchBackend:
    """Create the reference backend. It has no options but torch's own."""
    return TorchBackend()
