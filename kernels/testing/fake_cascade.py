"""The fake's cascade: one prefill wrapper a level, with the real one's signature (FlashInfer 0.7.4)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.testing.device_calls import device_call
from kernels.testing.fake_checks import MisuseError, demand
from kernels.testing.fake_merge import merge_state_in_place
from kernels.testing.fake_prefill import BatchPrefillWithPagedKVCacheWrapper


class MultiLevelCascadeAttentionWrapper:
    """Shared pages once for all, then each request's own; the parts are merged by their log-sum-exp."""

    def __init__(
        self,
        num_levels: int,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_indptr_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_indices_buf_arr: list[torch.Tensor] | None = None,
        paged_kv_last_page_len_buf_arr: list[torch.Tensor] | None = None,
    ) -> None:
        arrays = (
            qo_indptr_buf_arr,
            paged_kv_indptr_buf_arr,
            paged_kv_indices_buf_arr,
            paged_kv_last_page_len_buf_arr,
        )
        demand(num_levels >= 1, f"{num_levels} levels")
        self._levels = [
            self._create_level(float_workspace_buffer, kv_layout, use_cuda_graph, buffers)
            for buffers in _per_level(num_levels, use_cuda_graph, arrays)
        ]
        self._use_cuda_graph = use_cuda_graph

    _level_class = BatchPrefillWithPagedKVCacheWrapper  # another where the fake knows an accelerator

    def _create_level(
        self, workspace: torch.Tensor, kv_layout: str, use_cuda_graph: bool, buffers: Sequence[torch.Tensor | None]
    ) -> BatchPrefillWithPagedKVCacheWrapper:
        qo, kv, indices, last = buffers
        return self._level_class(workspace, kv_layout, use_cuda_graph, qo, kv, indices, last)

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether the levels keep to their buffers."""
        return self._use_cuda_graph

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffers: list[torch.Tensor]
    ) -> None:
        """Take other memory: one int workspace a level."""
        for level, int_workspace_buffer in zip(self._levels, int_workspace_buffers, strict=True):
            level.reset_workspace_buffer(float_workspace_buffer, int_workspace_buffer)

    def plan(  # noqa: PLR0913 - the real signature
        self,
        qo_indptr_arr: list[torch.Tensor],
        paged_kv_indptr_arr: list[torch.Tensor],
        paged_kv_indices_arr: list[torch.Tensor],
        paged_kv_last_page_len: list[torch.Tensor],
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
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
    ) -> None:
        """Plan each level; ``causal`` is the last one's only, the others' keys all come before every query."""
        # cascade.py hands the window to each level, which counts it from its own last key.
        demand(window_left == -1, "a window within a cascade would be counted in each level by itself")
        arrays = (qo_indptr_arr, paged_kv_indptr_arr, paged_kv_indices_arr, paged_kv_last_page_len)
        levels = list(zip(self._levels, *arrays, strict=True))
        for i, (level, qo, kv, indices, last) in enumerate(levels):
            is_last = i == len(levels) - 1
            full = is_last or all(length == page_size for length in last.tolist())
            demand(full, f"level {i} ends within a page: what follows would stand at a gap")
            level.plan(
                qo,
                kv,
                indices,
                last,
                num_qo_heads,
                num_kv_heads,
                head_dim,
                page_size,
                causal=causal if is_last else False,
                pos_encoding_mode=pos_encoding_mode,
                use_fp16_qk_reduction=use_fp16_qk_reduction,
                sm_scale=sm_scale,
                window_left=window_left,
                logits_soft_cap=logits_soft_cap,
                rope_scale=rope_scale,
                rope_theta=rope_theta,
                q_data_type=q_data_type,
                kv_data_type=kv_data_type,
            )
        self._check_levels()

    def _check_levels(self) -> None:
        """All levels must be about the same queries, and their keys must stand before them."""
        plans = [level.planned_or_raise() for level in self._levels]
        rows = {planned.qo[-1] for planned in plans}
        demand(len(rows) == 1, f"levels of {sorted(rows)} query rows")
        lens = zip(plans[-1].q_lens(), plans[-1].kv_lens(), strict=True)
        for i, (q_len, kv_len) in enumerate(lens):
            # Levels above are not causal: a query that stands among their keys would see later ones.
            demand(q_len <= kv_len, f"request {i} has {q_len} queries on {kv_len} keys of its own")

    def run(self, q: torch.Tensor, paged_kv_cache: torch.Tensor) -> torch.Tensor:
        """Attend over all levels: [T, num_qo_heads, head_dim]."""
        device_call(self._check_pages_apart)
        out, lse = self._both(self._levels[-1], q, paged_kv_cache)
        for level in self._levels[:-1]:
            part, part_lse = self._both(level, q, paged_kv_cache)
            merge_state_in_place(out, lse, part, part_lse)
        return out

    def _both(
        self, level: BatchPrefillWithPagedKVCacheWrapper, q: torch.Tensor, pool: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        result = level.run(q, pool, return_lse=True)
        if isinstance(result, torch.Tensor):
            raise MisuseError("no log-sum-exp")
        return result

    def _check_pages_apart(self) -> None:
        """A page in two levels would be attended to twice. Unchecked there."""
        seen: set[int] = set()
        for i, level in enumerate(self._levels):
            pages = level.pages_read()
            demand(not seen & pages, f"level {i} has pages of the levels above: {sorted(seen & pages)[:4]}")
            seen |= pages


def _per_level(
    num_levels: int, use_cuda_graph: bool, arrays: Sequence[list[torch.Tensor] | None]
) -> list[tuple[torch.Tensor | None, ...]]:
    """Turn one list per kind of buffer into one tuple per level."""
    if not use_cuda_graph:
        demand(all(array is None for array in arrays), "buffers are for use_cuda_graph=True")  # ignored there
        return [(None,) * len(arrays)] * num_levels
    given = [array for array in arrays if array is not None]
    fits = len(given) == len(arrays) and all(len(array) == num_levels for array in given)
    demand(fits, f"in CUDA graph mode each kind of buffer must come once a level ({num_levels})")
    return list(zip(*given, strict=True))
