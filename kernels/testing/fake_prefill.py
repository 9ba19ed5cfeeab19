"""The fake's prefill wrapper, with the real one's signature (FlashInfer 0.7.4)."""

from __future__ import annotations

import math
from typing import Any

import torch

from kernels.testing import fake_checks as checks
from kernels.testing.fake_attention import AttentionKind
from kernels.testing.fake_checks import demand
from kernels.testing.fake_plan import HeadShape, Planned, dtype_of, refuse_unmodelled, soft_cap_of
from kernels.testing.fake_wrapper import PagedWrapper

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


class BatchPrefillWithPagedKVCacheWrapper(PagedWrapper):
    """Attention of any batch over pages."""

    def __init__(  # noqa: PLR0913 - the real signature
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
        max_total_num_rows: int | None = None,
    ) -> None:
        refuse_unmodelled(
            custom_mask_buf=custom_mask_buf,
            mask_indptr_buf=mask_indptr_buf,
            jit_args=jit_args,
            jit_kwargs=jit_kwargs,
            variant_owns_mask=variant_owns_mask,
        )
        demand(backend in ("auto", "fa2", "fa3"), f"backend {backend!r} is not modelled")
        only_graph = max_total_num_rows is None or use_cuda_graph
        demand(only_graph, "max_total_num_rows requires use_cuda_graph=True")  # prefill.py
        buffers = (qo_indptr_buf, paged_kv_indptr_buf, paged_kv_indices_buf, paged_kv_last_page_len_buf)
        self._init_paged(float_workspace_buffer, kv_layout, use_cuda_graph, buffers)
        self._backend = backend
        self._max_total_num_rows = max_total_num_rows

    def plan(  # noqa: PLR0913 - the real signature
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: str | torch.dtype = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        uniform_q_len: int | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        """Lay out the work of a step from host arrays; the page ids are on the device."""
        refuse_unmodelled(
            head_dim_vo=None if head_dim_vo == head_dim_qk else head_dim_vo,
            custom_mask=custom_mask,
            packed_custom_mask=packed_custom_mask,
            pos_encoding_mode=pos_encoding_mode,
            use_fp16_qk_reduction=use_fp16_qk_reduction,
            rope=rope_scale or rope_theta,
            o_data_type=None if o_data_type in (None, q_data_type) else o_data_type,
            items=(prefix_len_ptr, token_pos_in_items_ptr, max_item_len_ptr) != (None, None, None),
            token_pos_in_items_len=token_pos_in_items_len,
            lens=(seq_lens, seq_lens_q, block_tables, max_token_per_sequence, max_sequence_kv) != (None,) * 5,
            use_token_head_sf=use_token_head_sf,
        )
        self._begin_plan()
        q_dtype = dtype_of(q_data_type)
        kv_dtype = q_dtype if kv_data_type is None else dtype_of(kv_data_type)
        shape = HeadShape(num_qo_heads, num_kv_heads, head_dim_qk, page_size, q_dtype, kv_dtype)
        scale = 1 / math.sqrt(head_dim_qk) if sm_scale is None else sm_scale
        kind = AttentionKind(causal, window_left, soft_cap_of(logits_soft_cap), scale)
        planned = self._read(qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, shape, kind)
        self._keep_rows(planned.qo[-1])
        self._store(planned, paged_kv_indices)
        self._end_plan(planned)

    def _read(
        self,
        qo: torch.Tensor,
        kv: torch.Tensor,
        indices: torch.Tensor,
        last: torch.Tensor,
        shape: HeadShape,
        kind: AttentionKind,
    ) -> Planned:
        """Check the arrays and take them into lists."""
        devices = [indices, *self._device_buffers()]
        qo_offsets = checks.check_indptr("qo_indptr", qo, devices=devices)
        kv_offsets = checks.check_indptr("paged_kv_indptr", kv, devices=devices)
        checks.check_host("paged_kv_last_page_len", last, devices)
        checks.check_pages(indices, kv_offsets)
        planned = Planned(qo_offsets, kv_offsets, last.tolist(), shape, kind)
        self._check_planned(planned)
        return planned

    def _keep_rows(self, num_rows: int) -> None:
        """In graph mode the first plan fixes how many rows there may be. prefill.py"""
        if not self.is_cuda_graph_enabled:
            return
        if self._max_total_num_rows is None:
            self._max_total_num_rows = num_rows
        most = self._max_total_num_rows
        demand(num_rows <= most, f"{num_rows} rows exceed the {most} of the first plan")

    def run(  # noqa: PLR0913 - the real signature
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        q_scale: float | torch.Tensor | None = None,
        k_scale: float | torch.Tensor | None = None,
        v_scale: float | torch.Tensor | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: Any = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> Result:
        """Attend: [T, num_qo_heads, head_dim]; with ``return_lse`` also [T, num_qo_heads] fp32, base 2."""
        refuse_unmodelled(
            args=bool(args),
            scales=(q_scale, k_scale, v_scale) != (None,) * 3,
            lse=(lse_base, lse_layout) != ("log2", "NH"),
            sinks=sinks,
            rest=(kv_cache_sf, skip_softmax_threshold_scale_factor, use_fp16_softmax, uses_spcompress) != (None,) * 4,
        )
        computed, computed_lse = self._run(q, paged_kv_cache, out=out, lse=lse, window_left=window_left)
        return (computed, computed_lse) if return_lse else computed
