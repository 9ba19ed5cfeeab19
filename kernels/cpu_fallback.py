"""The CPU backend where the C++ kernels cannot serve, in torch's fast parts: oneDNN linears packed at load, and
scaled_dot_product_attention per request.

Owns which torch call is quickest on a CPU; the math is torch_backend's, which its tests compare with.
Times in the comments: 2-core Zen 4 server, bf16, SmolLM2-135M's shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
import torch.nn.functional as F

from kernels.paged_kv import PagedKV, page_bytes, to_index
from kernels.step import Activation, AttnSpec, KVPool, StepMeta
from kernels.torch_backend import attend, visible

# oneDNN picks a weight layout for one number of rows. The one for 64 is as quick as any from 1 row to 512 in bf16;
# in fp32 the one for 1 row costs 20-60 % at 2 to 64 rows.
_PACKED_FOR_ROWS = 64
# Queries that share one attention call; divides every page size.
_QUERY_BLOCK = 32


class PackedLinear(NamedTuple):
    """A linear layer's parameters: the weight in oneDNN's own layout where ``prepacked``, else [out, in]."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    prepacked: bool


class _QueryBlock(NamedTuple):
    """Queries at positions ``n * _QUERY_BLOCK`` and the 31 after it: rows of a request, and the keys that they see.

    rows: among the request's padded queries; keys: among its gathered tokens; mask: [_QUERY_BLOCK, keys], added to the
    scores.
    """

    rows: slice
    keys: slice
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Reach:
    """What one request's queries see in the layers of one window.

    pages: ids to gather; first:last: the keys among the gathered tokens; blocks: the queries cut at multiples of
    _QUERY_BLOCK, lead of them padding before the first; none for a single query, which sees all keys::

        pages    [ p3 | p4 | p5 ]        those before the window are never gathered
        tokens    ..kkkkkkkkkkk..        first = 2, last = 13
        queries  [ 00qqqq | qq0000 ]     lead = 2
    """

    pages: torch.Tensor
    first: int
    last: int
    lead: int
    blocks: list[_QueryBlock]


@dataclass(frozen=True, slots=True)
class CpuPlan:
    """What the layers of a step share.

    Attributes:
        slots: [T] int64, where each token's K and V go.
        q_lens: Tokens of each request.
        reaches: Per distinct window of the pool's layers, per request.
    """

    slots: torch.Tensor
    q_lens: list[int]
    reaches: dict[int, list[_Reach]]


class CpuFallback:
    """All of a Backend that works layer by layer, of torch calls.

    A row of ``linear`` comes out bit-equal in every batch of the same thread count where that was measured: CPUs with
    AVX512 and without AMX. oneDNN promises it nowhere; elsewhere a row may differ in its last bits.
    """

    def __init__(self, *, prepacked_dtypes: Iterable[torch.dtype]) -> None:
        """Create a backend without C++ kernels.

        Args:
            prepacked_dtypes: Those whose linears oneDNN runs from packed weights; the others use F.linear.
        """
        self.name = "cpu"
        self.device = "cpu"
        self.page_sizes: tuple[int, ...] = (32, 64, 128)
        self._prepacked_dtypes = frozenset(prepacked_dtypes)
        self.default_dtype = torch.bfloat16 if torch.bfloat16 in self._prepacked_dtypes else torch.float32

    def alloc_kv(
        self, layer_specs: Sequence[AttnSpec], *, num_pages: int, page_size: int, dtype: torch.dtype
    ) -> PagedKV:
        """Allocate zeroed pages for one layer per entry of ``layer_specs``.

        Raises:
            ValueError: ``page_size`` is not one of ``page_sizes``.
        """
        if page_size not in self.page_sizes:
            raise ValueError(f"the cpu backend has pages of 32, 64 or 128 tokens, not {page_size}")
        return PagedKV(layer_specs, num_pages=num_pages, page_size=page_size, dtype=dtype)

    def kv_page_bytes(self, layer_specs: Sequence[AttnSpec], *, page_size: int, dtype: torch.dtype) -> int:
        """Return the bytes of one page over all layers, without allocating."""
        return page_bytes(layer_specs, page_size=page_size, dtype=dtype)

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
        """Repack weight, [out, in], for oneDNN. The result holds no reference to ``weight`` where it was repacked."""
        if weight.dtype not in self._prepacked_dtypes:
            return PackedLinear(weight, bias, prepacked=False)
        packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _PACKED_FOR_ROWS)
        return PackedLinear(packed, bias, prepacked=True)

    def linear(self, x: torch.Tensor, packed: PackedLinear) -> torch.Tensor:
        """Return ``x @ weight.T + bias``: [T, in] -> [T, out]."""
        weight, bias, prepacked = packed
        if not prepacked:
            return F.linear(x, weight, bias)
        if x.shape[0] == 1:
            # oneDNN adds up a lone row in another order (seen from 1024 inputs on): run it as two.
            return self.linear(x.expand(2, -1), packed)[:1]
        return cast(torch.Tensor, torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], ""))

    def rmsnorm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        """Return ``x / rms(x) * weight`` over the last dimension, computed in fp32, x's dtype."""
        if weight.dtype != x.dtype:  # Gemma's fp32 weights on bf16; torch fuses only equal dtypes, and warns.
            return F.rms_norm(x.float(), weight.shape, weight, eps).to(x.dtype)
        # Sums in fp32 and rounds once for bf16 too; 15 us, written out 20 us.
        return F.rms_norm(x, weight.shape, weight, eps)

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
        num_tokens, num_q_heads, head_dim = q.shape
        normed_q = q if q_weight is None else self.rmsnorm(q, q_weight, eps)
        normed_k = k if k_weight is None else self.rmsnorm(k, k_weight, eps)
        # q and k in one tensor halve the calls: 24 us, one after the other 38 us.
        heads = torch.cat((normed_q, normed_k), dim=1).float().view(num_tokens, -1, 2, head_dim // 2)
        cos, sin = cos_sin.view(num_tokens, 2, 1, head_dim // 2).unbind(1)
        rotated = heads * cos.unsqueeze(1)
        (low, high), (out_low, out_high) = heads.unbind(2), rotated.unbind(2)
        out_low.addcmul_(high, sin, value=-1)
        out_high.addcmul_(low, sin)
        out = rotated.view(num_tokens, -1, head_dim)
        q.copy_(out[:, :num_q_heads])
        k.copy_(out[:, num_q_heads:])

    def plan(self, meta: StepMeta, kv: KVPool) -> CpuPlan:
        """Find the keys and masks of each request, once for all layers of a window."""
        assert isinstance(kv, PagedKV)
        pages = to_index(meta.kv_indices)
        bounds, kv_lens = meta.kv_indptr.tolist(), meta.kv_lens.tolist()
        q_lens = (meta.qo_indptr[1:] - meta.qo_indptr[:-1]).tolist()
        tables = [pages[bounds[i] : bounds[i + 1]] for i in range(meta.num_reqs)]
        reaches = {
            window: [_reach(kv, window, *request) for request in zip(tables, q_lens, kv_lens, strict=True)]
            for window in {spec.window_left for spec in kv.layer_specs}
        }
        return CpuPlan(to_index(meta.slot_mapping), q_lens, reaches)

    def attention(
        self, plan: CpuPlan, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv: KVPool
    ) -> torch.Tensor:
        """Append k and v, then attend request by request: [T, num_q_heads * head_dim]; see Backend."""
        assert isinstance(kv, PagedKV)
        spec = kv.layer_specs[layer]
        kv.append(layer, plan.slots, k, v)
        outs = []
        for queries, reach in zip(q.split_with_sizes(plan.q_lens), plan.reaches[spec.window_left], strict=True):
            keys, values = kv.gather(layer, reach.pages)
            outs.append(_attend(queries, keys, values, reach, spec))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def act_mul(self, x: torch.Tensor, kind: Activation) -> torch.Tensor:
        """Return ``act(x[:, :I]) * x[:, I:]``: [T, 2*I] -> [T, I]."""
        gate, up = x.chunk(2, dim=-1)
        activated = F.silu(gate) if kind == "silu" else F.gelu(gate, approximate="tanh")
        return activated.mul_(up)


def _reach(kv: PagedKV, window: int, pages: torch.Tensor, q_len: int, kv_len: int) -> _Reach:
    # The first query, at position kv_len - q_len, sees furthest back.
    start = _first_key(kv_len - q_len, window)
    if q_len > 1:
        start = _round_down(_first_key(_round_down(kv_len - q_len), window))
    skipped_pages, first = divmod(start, kv.page_size)
    base = skipped_pages * kv.page_size
    blocks = [] if q_len == 1 else _cut_queries(kv.dtype, window, base, kv_len - q_len, kv_len)
    return _Reach(pages[skipped_pages:], first, kv_len - base, (kv_len - q_len) % _QUERY_BLOCK, blocks)


def _cut_queries(dtype: torch.dtype, window: int, base: int, start: int, end: int) -> list[_QueryBlock]:
    """Cut the queries at positions ``start:end``. All shapes depend on a block's own position only."""
    blocks = []
    for position in range(_round_down(start), end, _QUERY_BLOCK):
        row = position - _round_down(start)
        first, last = _round_down(_first_key(position, window)), position + _QUERY_BLOCK
        hidden = visible(_QUERY_BLOCK, last - first, window).logical_not_()
        mask = torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, float("-inf"))
        blocks.append(_QueryBlock(slice(row, row + _QUERY_BLOCK), slice(first - base, last - base), mask))
    return blocks


def _first_key(position: int, window: int) -> int:
    return max(0, position - window) if window >= 0 else 0


def _round_down(position: int) -> int:
    return position // _QUERY_BLOCK * _QUERY_BLOCK


def _attend(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, reach: _Reach, spec: AttnSpec
) -> torch.Tensor:
    seen = slice(reach.first, reach.last)
    if spec.soft_cap:
        return attend(queries, keys[seen], values[seen], spec)
    if not reach.blocks:
        return _attend_one(queries, keys[seen], values[seen], spec)
    return _attend_blocks(queries, keys, values, reach, spec)


def _attend_one(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, spec: AttnSpec) -> torch.Tensor:
    # The query heads of one KV head become rows of one product: 59 us at 256 tokens of context; with enable_gqa,
    # a matrix-vector product a head, 176 us; gathered and converted to fp32, 85 us.
    grouped = query.view(1, spec.num_kv_heads, -1, spec.head_dim)
    return F.scaled_dot_product_attention(
        grouped, _heads_first(keys), _heads_first(values), scale=spec.sm_scale
    ).reshape(1, -1)


def _attend_blocks(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, reach: _Reach, spec: AttnSpec
) -> torch.Tensor:
    """Attend block by block, so that a row's sums do not depend on where its prompt was cut or what came before.

    Args:
        queries: [q_len, num_q_heads, head_dim].
        keys: [gathered, num_kv_heads, head_dim]; overwritten behind the last key.
        values: Likewise.
        reach: Of this request.
        spec: Of this layer.
    """
    padded = queries.new_zeros((len(reach.blocks) * _QUERY_BLOCK, *queries.shape[1:]))
    padded[reach.lead : reach.lead + len(queries)] = queries
    # The mask hides what stands behind the last key, but only a finite value: 0 * NaN is NaN.
    keys[reach.last :] = 0
    values[reach.last :] = 0
    q, k, v = _heads_first(padded), _heads_first(keys), _heads_first(values)
    outs = [
        F.scaled_dot_product_attention(
            q[:, :, block.rows],
            k[:, :, block.keys],
            v[:, :, block.keys],
            attn_mask=block.mask,
            scale=spec.sm_scale,
            enable_gqa=True,
        )
        for block in reach.blocks
    ]
    rows = torch.cat(outs, dim=2).squeeze(0).transpose(0, 1).flatten(1)
    return rows[reach.lead : reach.lead + len(queries)]


def _heads_first(x: torch.Tensor) -> torch.Tensor:
    """[n, heads, head_dim] -> [1, heads, n, head_dim]."""
    return x.transpose(0, 1).unsqueeze(0)


def supported_dtypes() -> frozenset[torch.dtype]:
    """Return the dtypes whose linears this machine's oneDNN runs from packed weights."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return frozenset()
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return frozenset({torch.float32, torch.bfloat16})
    return frozenset({torch.float32})
