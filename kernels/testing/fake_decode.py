"""The fake's decode wrappers and the planner that spares their copies, with the real signatures (FlashInfer 0.7.4)."""

from __future__ import annotations

import math
from typing import Any

import torch

from kernels.testing import fake_checks as checks
from kernels.testing.device_calls import device_call
from kernels.testing.fake_attention import AttentionKind
from kernels.testing.fake_checks import MisuseError, demand
from kernels.testing.fake_plan import HeadShape, Planned, dtype_of, refuse_unmodelled, soft_cap_of
from kernels.testing.fake_wrapper import PagedWrapper

Result = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
CUDA_CORE_GROUPS = (1, 2, 3, 4, 6, 8, 16)  # utils.cuh, DISPATCH_GQA_GROUP_SIZE


class BatchDecodeWithPagedKVCacheWrapper(PagedWrapper):
    """Attention of a batch with one query a request (or ``q_len_per_req``) over pages."""

    def __init__(  # noqa: PLR0913 - the real signature
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
    ) -> None:
        refuse_unmodelled(jit_args=jit_args, jit_kwargs=jit_kwargs)
        demand(backend in ("auto", "fa2", "fa3"), f"backend {backend!r} is not modelled")
        last = paged_kv_last_page_len_buffer
        qo = None if last is None else torch.arange(len(last) + 1, dtype=torch.int32)
        buffers = (qo, paged_kv_indptr_buffer, paged_kv_indices_buffer, last)
        self._init_paged(float_workspace_buffer, kv_layout, use_cuda_graph, buffers)
        device_call(_check_zeroed, float_workspace_buffer)
        self._backend = backend
        self._use_tensor_cores = use_tensor_cores
        self._q_len_per_req: int | None = None

    @property
    def use_tensor_cores(self) -> bool:
        """Whether the prefill kernels compute."""
        return self._use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *deprecated_positional_args: Any,
        **kwargs: Any,
    ) -> None:
        """Lay out the work of a step from host arrays; the page ids are on the device. Options by name only."""
        # decode.py warns of them: "Scheduled for removal in a future release".
        demand(not deprecated_positional_args, "plan() options after page_size must be given by name")
        self._plan_impl(indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size, **kwargs)

    def _plan_impl(  # noqa: PLR0913 - the real signature
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        window_right: int = 0,
        logits_soft_cap: float | None = None,
        q_data_type: str | torch.dtype | None = "float16",
        kv_data_type: str | torch.dtype | None = None,
        o_data_type: str | torch.dtype | None = None,
        data_type: str | torch.dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        is_causal: bool | None = None,
        use_token_head_sf: bool = False,
    ) -> None:
        refuse_unmodelled(
            pos_encoding_mode=pos_encoding_mode,
            window_right=window_right,
            o_data_type=None if o_data_type in (None, q_data_type) else o_data_type,
            data_type=data_type,
            rope=rope_scale or rope_theta,
            tables=(block_tables, seq_lens, is_causal) != (None,) * 3,
            use_token_head_sf=use_token_head_sf,
        )
        self._begin_plan()
        tensor_cores = self.use_tensor_cores
        demand(fixed_split_size is None or tensor_cores, "fixed_split_size is only supported by tensor core decode")
        shape = _shape(num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type, kv_data_type)
        kind = _kind(head_dim, window_left, logits_soft_cap, sm_scale, q_len_per_req)
        planned = self._read(indptr, indices, last_page_len, shape, kind, q_len_per_req)
        self._keep_q_len(q_len_per_req)
        self._store(planned, indices)
        self._end_plan(planned)

    def _read(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last: torch.Tensor,
        shape: HeadShape,
        kind: AttentionKind,
        q_len_per_req: int,
    ) -> Planned:
        """Check the arrays and take them into lists."""
        devices = [indices, *self._device_buffers()]
        kv_offsets = checks.check_indptr("indptr", indptr, devices=devices)
        checks.check_host("last_page_len", last, devices)
        checks.check_pages(indices, kv_offsets)
        qo_offsets = [i * q_len_per_req for i in range(len(last) + 1)]
        planned = Planned(qo_offsets, kv_offsets, last.tolist(), shape, kind)
        self._check_planned(planned)
        group = shape.num_qo_heads // shape.num_kv_heads
        known = self.use_tensor_cores or group in CUDA_CORE_GROUPS
        demand(known, f"{group} query heads on a KV head: only with use_tensor_cores")
        return planned

    def _keep_q_len(self, q_len_per_req: int) -> None:
        demand(q_len_per_req == 1 or self.use_tensor_cores, "q_len_per_req > 1 requires tensor-core decode")
        frozen = self._q_len_per_req if self.is_cuda_graph_enabled else None
        same = frozen in (None, q_len_per_req)
        demand(same, f"q_len_per_req is part of the frozen cudagraph shape: {frozen}, got {q_len_per_req}")
        self._q_len_per_req = q_len_per_req

    def run(  # noqa: PLR0913 - the real signature
        self,
        q: torch.Tensor,
        paged_kv_cache: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Any = None,
    ) -> Result:
        """Attend: [B * q_len_per_req, num_qo_heads, head_dim]; with ``return_lse`` also the log-sum-exp, base 2."""
        refuse_unmodelled(
            args=bool(args),
            scales=(q_scale, k_scale, v_scale) != (None,) * 3,
            sinks=sinks,
            q_len_per_req=q_len_per_req,  # deprecated there
            rest=(skip_softmax_threshold_scale_factor, kv_cache_sf) != (None,) * 2,
        )
        computed, computed_lse = self._run(q, paged_kv_cache, out=out, lse=lse, window_left=window_left)
        return (computed, computed_lse) if return_lse else computed


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """A decode wrapper that keeps to its buffers."""

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer,
            kv_layout,
            use_cuda_graph=True,
            use_tensor_cores=use_tensor_cores,
            paged_kv_indptr_buffer=indptr_buffer,
            paged_kv_indices_buffer=indices_buffer,
            paged_kv_last_page_len_buffer=last_page_len_buffer,
        )


def fast_decode_plan(  # noqa: PLR0913 - the real signature
    self: BatchDecodeWithPagedKVCacheWrapper,
    indptr: torch.Tensor,
    indices: torch.Tensor,
    last_page_len: torch.Tensor,
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    pos_encoding_mode: str = "NONE",
    window_left: int = -1,
    logits_soft_cap: float | None = None,
    q_data_type: str | torch.dtype | None = None,
    kv_data_type: str | torch.dtype | None = None,
    data_type: str | torch.dtype | None = None,
    sm_scale: float | None = None,
    rope_scale: float | None = None,
    rope_theta: float | None = None,
    non_blocking: bool = True,
    fixed_split_size: int | None = None,
    disable_split_kv: bool = False,
    q_len_per_req: int = 1,
    global_override_indptr_cpu: torch.Tensor | None = None,
) -> None:
    """Plan again without copying anything into the wrapper's buffers: the caller has filled them."""
    refuse_unmodelled(pos_encoding_mode=pos_encoding_mode, data_type=data_type, rope=rope_scale or rope_theta)
    # decode.py keeps the arrays it is given as the device's: host arrays would be read by the kernel.
    demand(self.is_cuda_graph_enabled, "fast_decode_plan without use_cuda_graph takes host arrays for the device's")
    self._begin_plan()
    before = self._planned
    if before is None:
        raise MisuseError("fast_decode_plan before plan(): there is no cached module")
    shape = _shape(num_qo_heads, num_kv_heads, head_dim, page_size, q_data_type or "float16", kv_data_type)
    demand(shape == before.shape, f"the module was built for {before.shape}, not {shape}")  # decode.py: reused as it is
    kind = _kind(head_dim, window_left, logits_soft_cap, sm_scale, q_len_per_req)
    same = (kind.window_left >= 0, kind.soft_cap > 0) == (before.kind.window_left >= 0, before.kind.soft_cap > 0)
    demand(same, "window and soft cap are compiled into the module that the first plan() chose")
    host = indptr if global_override_indptr_cpu is None else global_override_indptr_cpu
    planned = self._read(host, indices, last_page_len, shape, kind, q_len_per_req)
    self._keep_q_len(q_len_per_req)
    buffers = self._buffers(planned, indices)
    in_place = indices.data_ptr() == buffers.kv_indices.data_ptr()
    demand(in_place, "fast_decode_plan copies no page ids: they must lie in the wrapper's buffer")
    self._end_plan(planned)


def _shape(
    num_qo_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page_size: int,
    q_data_type: str | torch.dtype | None,
    kv_data_type: str | torch.dtype | None,
) -> HeadShape:
    if q_data_type is None:
        raise MisuseError("q_data_type must be given")
    q_dtype = dtype_of(q_data_type)
    kv_dtype = q_dtype if kv_data_type is None else dtype_of(kv_data_type)
    return HeadShape(num_qo_heads, num_kv_heads, head_dim, page_size, q_dtype, kv_dtype)


def _kind(
    head_dim: int, window_left: int, logits_soft_cap: float | None, sm_scale: float | None, q_len_per_req: int
) -> AttentionKind:
    scale = 1 / math.sqrt(head_dim) if sm_scale is None else sm_scale
    return AttentionKind(q_len_per_req > 1, window_left, soft_cap_of(logits_soft_cap), scale)


def _check_zeroed(workspace: torch.Tensor) -> None:
    """decode.py's docstring: the workspace comes zeroed. A sample of it, for time."""
    step = max(1, workspace.numel() // 1024)
    demand(not bool(workspace[::step].any()), "a decode wrapper's float workspace must be zeroed before its first use")
