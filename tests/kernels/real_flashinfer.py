"""The real FlashInfer, for tests: it imports without a GPU, and its Python runs on CPU tensors over stand-in kernels.

So everything between the backend and the compiled kernels is the library's own: its checks, copies and arguments.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kernels.testing import fake_flashinfer as fake
from kernels.testing.device_calls import device_call
from kernels.testing.fake_attention import AttentionKind, PagedBatch, attend_paged


def import_flashinfer() -> ModuleType:
    """Import it. Takes some 4 s once; installed by requirements-flashinfer.lock."""
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", tempfile.mkdtemp(prefix="flashinfer-"))
    return importlib.import_module("flashinfer")


class AttentionModule:
    """Stands for a compiled module of prefill.py: plans into memory known by the int workspace's address, and runs.

    Args:
        backend: fa2 or fa3.
        built_for: What the module is compiled for, as the library names it.
        plans: By int workspace: query offsets, page offsets and token counts.
    """

    def __init__(self, backend: str, built_for: tuple[Any, ...], plans: dict[int, tuple[list[int], ...]]) -> None:
        self.backend = backend
        self._q_dtype, self._kv_dtype, self._o_dtype, id_type, *rest = built_for
        self._head_dim, _, _, self._has_window, self._has_cap = rest[:5]
        assert id_type == torch.int32
        self._plans = plans

    def plan(self, floats: torch.Tensor, ints: torch.Tensor, pinned: torch.Tensor, *rest: Any) -> list[int]:
        """scheduler.cuh, without a schedule."""
        assert len(rest) == (18 if self.backend == "fa2" else 13)
        qo, kv, lens, num_rows, batch_size, num_qo_heads, num_kv_heads, _, _, head_dim, _, _, window = rest[:13]
        assert floats.dtype == ints.dtype == pinned.dtype == torch.uint8
        assert pinned.shape == ints.shape
        assert all(x.dtype == torch.int32 and x.is_contiguous() for x in (qo, kv, lens))
        assert len(qo) == len(kv) == batch_size + 1
        assert int(qo[-1]) <= num_rows
        assert num_qo_heads % num_kv_heads == 0
        assert head_dim == self._head_dim
        assert (window >= 0) == self._has_window
        self._plans[ints.data_ptr()] = (qo.tolist(), kv.tolist(), lens.tolist())
        return [batch_size]

    def paged_run(self, floats: torch.Tensor, ints: torch.Tensor, plan_info: list[int], *rest: Any) -> None:
        """batch_prefill_paged.cuh: arguments by their places."""
        q, k, v, qo, kv, indices, last, out, lse, mask_mode, layout, window, _ = rest[:13]
        soft_cap, sm_scale = rest[19:21]
        assert (q.dtype, k.dtype, out.dtype) == (self._q_dtype, self._kv_dtype, self._o_dtype)
        assert layout == 0  # NHD
        assert mask_mode in (0, 1)  # all, causal
        assert (soft_cap > 0) == self._has_cap
        kind = AttentionKind(mask_mode == 1, window, soft_cap, sm_scale)
        device_call(self._launch, ints, q, k, v, PagedBatch(qo, kv, indices, last), kind, out, lse)

    def _launch(
        self,
        ints: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: PagedBatch,
        kind: AttentionKind,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        made, made_lse = attend_paged(q, torch.stack((k, v), dim=1), batch, kind)
        held = (batch.qo_indptr.tolist(), batch.kv_indptr.tolist(), batch.kv_lens(k.shape[1]))
        assert held == self._plans[ints.data_ptr()], "the last plan into this workspace was about another step"
        out.copy_(made)
        if lse is not None:
            lse.copy_(made_lse)


def _append(k: Any, v: Any, batch: Any, positions: Any, k_pages: Any, v_pages: Any, *tables: Any) -> None:
    pool = k_pages.as_strided(
        (len(k_pages), 2, *k_pages.shape[1:]), (k_pages.stride(0), k_pages.stride(0) // 2, *k_pages.stride()[1:])
    )
    assert v_pages.data_ptr() == pool[:, 1].data_ptr()
    fake.append_paged_kv_cache(k, v, batch, positions, pool, *tables[:3])


def _rope(q: Any, k: Any, q_out: Any, k_out: Any, table: Any, positions: Any, interleave: bool) -> None:
    assert q_out.data_ptr() == q.data_ptr()
    assert k_out.data_ptr() == k.data_ptr()
    flat_q, flat_k = q.view(len(q), -1), k.view(len(k), -1)
    fake.apply_rope_with_cos_sin_cache_inplace(positions, flat_q, flat_k, q.shape[2], table, not interleave)


def _norm_module() -> SimpleNamespace:
    return SimpleNamespace(
        rmsnorm=lambda out, x, weight, eps, _: fake.rmsnorm(x, weight, eps, out=out),
        gemma_rmsnorm=lambda out, x, weight, eps, _: fake.gemma_rmsnorm(x, weight, eps, out=out),
        fused_add_rmsnorm=lambda *args: fake.fused_add_rmsnorm(*args[:4]),
        gemma_fused_add_rmsnorm=lambda *args: fake.gemma_fused_add_rmsnorm(*args[:4]),
    )


def _act_module(name: str) -> SimpleNamespace:
    gated = getattr(fake, f"{name}_and_mul")
    return SimpleNamespace(**{f"{name}_and_mul": lambda out, x, _: gated(x, out)})


@contextmanager
def stand_in_kernels(flashinfer: ModuleType) -> Iterator[None]:
    """Have the library compute on CPU tensors, as it would on an H200."""
    plans: dict[int, tuple[list[int], ...]] = {}
    empty = torch.empty

    def module(backend: str, *built_for: Any) -> AttentionModule:
        return AttentionModule(backend, built_for, plans)

    def unpinned(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return empty(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", unpinned)
        patch.setattr(torch.cuda, "device", lambda device: nullcontext())
        for part in (flashinfer.prefill, flashinfer.decode):
            patch.setattr(part, "get_batch_prefill_module", module)
            patch.setattr(part, "determine_attention_backend", lambda *args, **kwargs: "fa3")
            patch.setattr(part, "get_compute_capability", lambda device: (9, 0))
        merging = SimpleNamespace(merge_state_in_place=fake.merge_state_in_place)
        patch.setattr(flashinfer.cascade, "get_cascade_module", lambda: merging)
        patch.setattr(flashinfer.page, "get_page_module", lambda: SimpleNamespace(append_paged_kv_cache=_append))
        rope = SimpleNamespace(apply_rope_pos_ids_cos_sin_cache=_rope)
        patch.setattr(flashinfer.rope, "get_rope_module", lambda: rope)
        patch.setattr(flashinfer.norm, "_use_cuda_norm", lambda device: True)
        patch.setattr(flashinfer.norm, "get_norm_module", _norm_module)
        patch.setattr(flashinfer.activation, "get_act_and_mul_module", _act_module)
        yield
