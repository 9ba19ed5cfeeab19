"""One ragged batch with its whole q, k and v, run through a backend's pages: cached prefix first, then the step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.backend import AttnSpec, Backend, KVPool
from tests.kernels.step_builder import Request, build_step, pages_needed, shuffled_tables

# Decodes, a whole prefill, extends of a cached prefix; pages full, partial and just begun.
MIXED: tuple[Request, ...] = ((1, 1), (1, 64), (1, 65), (1, 130), (5, 5), (2, 97), (33, 70), (64, 64), (130, 161))


@dataclass(frozen=True)
class AttentionCase:
    """Whole sequences: q, k and v per request, [kv_len, heads, head_dim]."""

    spec: AttnSpec
    requests: tuple[Request, ...]
    dtype: torch.dtype
    q: list[torch.Tensor]
    k: list[torch.Tensor]
    v: list[torch.Tensor]


def create_spec(
    *, num_kv_heads: int = 2, ratio: int = 3, head_dim: int = 64, window_left: int = -1, soft_cap: float = 0.0
) -> AttnSpec:
    return AttnSpec(num_kv_heads * ratio, num_kv_heads, head_dim, head_dim**-0.5, window_left, soft_cap)


def create_case(
    spec: AttnSpec, requests: Sequence[Request] = MIXED, *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> AttentionCase:
    generator = torch.Generator().manual_seed(seed)

    def random(num_heads: int) -> list[torch.Tensor]:
        shapes = [(kv_len, num_heads, spec.head_dim) for _, kv_len in requests]
        return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]

    return AttentionCase(
        spec, tuple(requests), dtype, random(spec.num_q_heads), random(spec.num_kv_heads), random(spec.num_kv_heads)
    )


def run_paged(backend: Backend, case: AttentionCase, *, page_size: int = 32, seed: int = 0) -> torch.Tensor:
    """The step's attention, [T, num_q_heads * head_dim], from pages that held NaN wherever nothing was written."""
    num_pages = pages_needed(case.requests, page_size) + 3
    kv = backend.alloc_kv([case.spec], num_pages=num_pages, page_size=page_size, dtype=case.dtype)
    fill_with_nan(kv, case.dtype)
    tables = shuffled_tables(case.requests, page_size=page_size, num_pages=num_pages, seed=seed)
    cached = [(i, kv_len - q_len) for i, (q_len, kv_len) in enumerate(case.requests) if kv_len > q_len]
    for i, length in cached:
        _attend(backend, case, kv, [(i, (length, length))], tables, page_size)
    return _attend(backend, case, kv, list(enumerate(case.requests)), tables, page_size)


def fill_with_nan(kv: KVPool, dtype: torch.dtype) -> None:
    nan = torch.full((kv.page_bytes // dtype.itemsize,), float("nan"), dtype=dtype)
    for page in range(kv.num_pages):
        kv.write_page(page, memoryview(nan.view(torch.uint8).numpy()))


def _attend(
    backend: Backend,
    case: AttentionCase,
    kv: KVPool,
    requests: list[tuple[int, Request]],
    tables: list[list[int]],
    page_size: int,
) -> torch.Tensor:
    meta = build_step([request for _, request in requests], [tables[i] for i, _ in requests], page_size=page_size)

    def rows(sequences: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([sequences[i][kv_len - q_len : kv_len] for i, (q_len, kv_len) in requests])

    out = backend.attention(backend.plan(meta, kv), 0, rows(case.q), rows(case.k), rows(case.v), kv)
    assert out.shape == (meta.num_tokens, case.spec.num_q_heads * case.spec.head_dim)
    assert out.dtype == case.dtype
    return out


def rotary_rows(num_tokens: int, head_dim: int, *, seed: int = 0) -> torch.Tensor:
    """cos_sin rows of random positions: [T, head_dim] fp32."""
    positions = np.random.default_rng(seed).integers(0, 4096, num_tokens)
    angles = torch.from_numpy(positions).unsqueeze(1) * 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    return torch.cat((angles.cos(), angles.sin()), dim=1).float()
