"""The fake FlashInfer's kernels outside of attention: append, rotary embedding, norms, activations."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from kernels.testing import fake_checks as checks
from kernels.testing.device_calls import device_call
from kernels.testing.fake_checks import demand


def append_paged_kv_cache(  # noqa: PLR0913 - the real signature
    append_key: torch.Tensor,
    append_value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    kv_last_page_len: torch.Tensor,
    kv_layout: str = "NHD",
) -> None:
    """Write K and V, [T, num_kv_heads, head_dim], at each token's position in its request's pages."""
    demand(kv_layout == "NHD", f"kv_layout {kv_layout!r}: the modules are built for NHD")
    shape = append_key.shape
    demand(append_key.ndim == 3 and append_value.shape == shape, "K and V must be [T, num_kv_heads, head_dim]")
    for name, x in (("append_key", append_key), ("append_value", append_value)):
        checks.check_vector_loads(name, x)
    tokens = (("batch_indices", batch_indices), ("positions", positions))
    tables = (("kv_indices", kv_indices), ("kv_indptr", kv_indptr), ("kv_last_page_len", kv_last_page_len))
    for name, x in (*tokens, *tables):
        checks.check_int32(name, x)
    for name, x in tokens:
        demand(len(x) == shape[0], f"{name} has {len(x)} entries for {shape[0]} tokens")  # page.cu
    demand(len(kv_indptr) == len(kv_last_page_len) + 1, "kv_indptr and kv_last_page_len disagree on B")  # page.cu
    demand(shape[2] in checks.HEAD_DIMS, f"head_dim {shape[2]} is not in {checks.HEAD_DIMS}")  # utils.cuh
    demand(append_key.dtype == append_value.dtype, "K and V differ in dtype")
    page_size = paged_kv_cache.shape[2] if isinstance(paged_kv_cache, torch.Tensor) and paged_kv_cache.ndim == 5 else 0
    # page.cu casts K and V to the cache's type, unchecked.
    pool = checks.check_pool(paged_kv_cache, page_size, shape[1], shape[2], append_key.dtype)
    device_call(
        _append, append_key, append_value, batch_indices, positions, pool, kv_indices, kv_indptr, kv_last_page_len
    )


def _append(
    key: torch.Tensor,
    value: torch.Tensor,
    batch_indices: torch.Tensor,
    positions: torch.Tensor,
    pool: torch.Tensor,
    kv_indices: torch.Tensor,
    kv_indptr: torch.Tensor,
    last_page_len: torch.Tensor,
) -> None:
    """The kernel. page.cuh divides ``indptr[request] * page_size + position``: all of it is unchecked there."""
    page_size, pages, ids = pool.shape[2], kv_indptr.tolist(), kv_indices.tolist()
    lasts, written = last_page_len.tolist(), set()
    for row, (request, position) in enumerate(zip(batch_indices.tolist(), positions.tolist(), strict=True)):
        demand(0 <= request < len(lasts), f"batch_indices names request {request} of {len(lasts)}")
        num_pages = pages[request + 1] - pages[request]
        length = (num_pages - 1) * page_size + lasts[request]
        demand(0 <= position < length, f"position {position} is outside of request {request}'s {length} tokens")
        entry = pages[request] + position // page_size
        demand(entry < len(ids), f"page {entry} of kv_indices, which has {len(ids)}")
        page, slot = ids[entry], position % page_size
        demand(0 <= page < pool.shape[0], f"page {page} is outside of the pool's {pool.shape[0]}")
        # Page 0 is nobody's: padding writes there, and who wins does not matter.
        demand(page == 0 or (page, slot) not in written, f"two tokens at slot {slot} of page {page}")
        written.add((page, slot))
        pool[page, 0, slot] = key[row]
        pool[page, 1, slot] = value[row]


def apply_rope_with_cos_sin_cache_inplace(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool = True,
) -> None:
    """Rotate query, [T, Hq * head_size], and key, [T, Hk * head_size], by a table [max_pos, rotary_dim] fp32."""
    demand(cos_sin_cache.dtype == torch.float32, "cos_sin_cache should be float32")  # rope.py
    demand(cos_sin_cache.ndim == 2 and cos_sin_cache.is_contiguous(), "cos_sin_cache must be [max_pos, rotary_dim]")
    rotary_dim = cos_sin_cache.shape[1]
    vector = max(8, head_size // 32)  # pos_enc.cuh: elements a thread rotates, all in one half
    fits = rotary_dim <= head_size and rotary_dim % (2 * vector) == 0
    demand(fits, f"rotary_dim {rotary_dim} of heads of {head_size}: a multiple of {2 * vector}, at most a head")
    integral = positions.dtype in (torch.int32, torch.int64) and positions.ndim == 1 and positions.is_contiguous()
    demand(integral, "positions must be a contiguous row of int32 or int64")  # rope.cu
    for name, x in (("query", query), ("key", key)):
        demand(x.ndim == 2, f"{name} must be [T, heads * head_size], has {x.ndim} dimensions")  # rope.py's docstring
        demand(x.shape[0] == len(positions), f"{name} has {x.shape[0]} rows for {len(positions)} positions")
        demand(x.shape[1] % head_size == 0, f"{name} of {x.shape[1]} is not heads of {head_size}")
        demand(x.dtype in checks.HALF_TYPES, f"{name} of {x.dtype} has no kernels")  # rope.cu
        checks.check_vector_loads(name, x)
    demand(query.dtype == key.dtype, f"query is {query.dtype}, key {key.dtype}")  # rope.cu casts, unchecked
    demand(not checks.overlaps(query, key), "query and key overlap")
    device_call(_rotate_both, positions, query, key, head_size, cos_sin_cache, is_neox)


def _rotate_both(
    positions: torch.Tensor, query: torch.Tensor, key: torch.Tensor, head_size: int, table: torch.Tensor, is_neox: bool
) -> None:
    known = bool(((positions >= 0) & (positions < table.shape[0])).all())
    demand(known, f"positions outside of cos_sin_cache's {table.shape[0]} rows: {positions.tolist()[:8]}")
    rows = table[positions.long()].unsqueeze(1)
    for x in (query, key):
        heads = x.view(x.shape[0], -1, head_size)
        heads.copy_(_rotate(heads.float(), rows, is_neox))


def _rotate(x: torch.Tensor, cos_sin: torch.Tensor, is_neox: bool) -> torch.Tensor:
    """Rotate pairs of the first rotary_dim of x's last dimension: element i and its half's, or neighbours."""
    rotary_dim = cos_sin.shape[-1]
    cos, sin = cos_sin[..., : rotary_dim // 2], cos_sin[..., rotary_dim // 2 :]
    turned, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    if is_neox:
        first, second = turned[..., : rotary_dim // 2], turned[..., rotary_dim // 2 :]
    else:
        first, second = turned[..., ::2], turned[..., 1::2]
    halves = (first * cos - second * sin, second * cos + first * sin)
    rotated = torch.cat(halves, dim=-1) if is_neox else torch.stack(halves, dim=-1).flatten(-2)
    return torch.cat((rotated, rest), dim=-1)


def rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Return ``input / rms(input) * weight``: [T, H], or [T, heads, head_dim] head by head."""
    return _norm_out(input, weight, eps, out, bias=0.0)


def gemma_rmsnorm(
    input: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    out: torch.Tensor | None = None,
    enable_pdl: bool | None = None,
) -> torch.Tensor:
    """Return ``input / rms(input) * (1 + weight)``: [T, H]."""
    demand(input.ndim == 2, f"input must be 2-D, has {input.ndim} dimensions")  # norm.cu
    return _norm_out(input, weight, eps, out, bias=1.0)


def fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """``residual += input; input = rmsnorm(residual)``, both [T, H]; the norm is of the sum before it is rounded."""
    _add_norm(input, residual, weight, eps, bias=0.0)


def gemma_fused_add_rmsnorm(
    input: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    eps: float = 1e-6,
    enable_pdl: bool | None = None,
) -> None:
    """As fused_add_rmsnorm, with ``1 + weight``."""
    _add_norm(input, residual, weight, eps, bias=1.0)


def _norm_out(
    x: torch.Tensor, weight: torch.Tensor, eps: float, out: torch.Tensor | None, *, bias: float
) -> torch.Tensor:
    demand(x.ndim in (2, 3), f"input must be 2-D or 3-D, has {x.ndim} dimensions")  # norm.cu
    _check_norm(x, weight)
    if out is None:
        # norm/__init__.py: empty_like, whose last dimension may not be the dense one where input's is not.
        return device_call(_normed, x, weight, eps, bias)
    demand(out.shape == x.shape and out.dtype == x.dtype, f"out is {tuple(out.shape)} {out.dtype}")  # norm.cu: shape
    checks.check_vector_loads("out", out)
    same = out.data_ptr() == x.data_ptr() and out.stride() == x.stride()
    demand(same or not checks.overlaps(out, x), "out overlaps input, but is not input itself")
    device_call(_norm_into, out, x, weight, eps, bias)
    return out


def _add_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, *, bias: float) -> None:
    demand(x.ndim == 2 and residual.shape == x.shape, "input and residual must be [T, H]")  # norm.cu
    _check_norm(x, weight)
    checks.check_vector_loads("residual", residual)
    demand(residual.dtype == x.dtype, f"residual is {residual.dtype}, input {x.dtype}")  # norm.cu casts, unchecked
    demand(not checks.overlaps(x, residual), "input and residual overlap")
    device_call(_add_norm_into, x, residual, weight, eps, bias)


def _check_norm(x: torch.Tensor, weight: torch.Tensor) -> None:
    demand(x.dtype in checks.HALF_TYPES, f"a norm of {x.dtype} has no kernels")  # norm.cu
    checks.check_vector_loads("input", x)
    demand(weight.ndim == 1 and weight.shape[0] == x.shape[-1], f"weight is {tuple(weight.shape)}")  # norm.cu
    checks.check_vector_loads("weight", weight)
    # norm.cu reads it as input's type, unchecked.
    demand(weight.dtype == x.dtype, f"weight is {weight.dtype}, input {x.dtype}")


def _normalize(x: torch.Tensor, weight: torch.Tensor, eps: float, bias: float) -> torch.Tensor:
    rms = torch.sqrt(x.pow(2).mean(dim=-1, keepdim=True) + eps)
    return x / rms * (weight.float() + bias)


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float, bias: float) -> torch.Tensor:
    return _normalize(x.float(), weight, eps, bias).to(x.dtype)


def _norm_into(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float, bias: float) -> None:
    out.copy_(_normed(x, weight, eps, bias))


def _add_norm_into(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, bias: float) -> None:
    total = x.float() + residual.float()
    residual.copy_(total)
    x.copy_(_normalize(total, weight, eps, bias))


def silu_and_mul(input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None) -> torch.Tensor:
    """Return ``silu(input[:, :I]) * input[:, I:]``: [T, 2 * I] -> [T, I]."""
    return _gated(input, out, "silu")


def gelu_tanh_and_mul(
    input: torch.Tensor, out: torch.Tensor | None = None, enable_pdl: bool | None = None
) -> torch.Tensor:
    """Return ``gelu(input[:, :I]) * input[:, I:]``, by the tanh approximation."""
    return _gated(input, out, "gelu_tanh")


def _gated(x: torch.Tensor, out: torch.Tensor | None, name: str) -> torch.Tensor:
    demand(x.shape[-1] % 2 == 0, "The last dimension must be even (2 * hidden_size).")  # activation.py
    demand(x.dtype in checks.HALF_TYPES, f"{name} of {x.dtype} has no kernels")  # jit/activation.py
    # activation.cuh steps by 2 * I whatever the stride, unchecked.
    demand(x.is_contiguous(), "input must be contiguous")
    checks.check_vector_loads("input", x)
    if out is None:
        return device_call(_gate, x, name)
    fits = out.shape == (*x.shape[:-1], x.shape[-1] // 2) and out.dtype == x.dtype and out.is_contiguous()
    demand(fits, f"out is {tuple(out.shape)} {out.dtype}, input {tuple(x.shape)}")
    demand(not checks.overlaps(out, x), "out overlaps input")
    device_call(_gate_into, out, x, name)
    return out


def _gate(x: torch.Tensor, name: str) -> torch.Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    act = F.silu(gate) if name == "silu" else F.gelu(gate, approximate="tanh")
    return (act * up).to(x.dtype)


def _gate_into(out: torch.Tensor, x: torch.Tensor, name: str) -> None:
    out.copy_(_gate(x, name))
