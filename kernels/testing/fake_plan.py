"""What a plan of the fake FlashInfer is: the shapes and lists that its kernels find in the integer workspace."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch

from kernels.testing import fake_checks as checks
from kernels.testing.fake_attention import AttentionKind
from kernels.testing.fake_checks import demand

NUM_SMS = 132  # an H200's: the planner cuts work for two blocks on each


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What a step's tensors look like.

    Attributes:
        num_qo_heads: Query heads.
        num_kv_heads: Key heads, a divisor of it.
        head_dim: Of both.
        page_size: Tokens a page.
        q_dtype: Of the queries and the output.
        kv_dtype: Of the pages.
    """

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    q_dtype: torch.dtype
    kv_dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Planned:
    """What plan() was told, as the kernels find it in the integer workspace.

    Attributes:
        qo: [B+1] token offsets.
        kv: [B+1] page offsets.
        last: [B] tokens in each request's last page.
        shape: Heads and types.
        kind: Mask, scale and cap.
    """

    qo: list[int]
    kv: list[int]
    last: list[int]
    shape: HeadShape
    kind: AttentionKind

    def kv_lens(self) -> list[int]:
        """Return each request's tokens in its pages."""
        pages = [end - start for start, end in pairwise(self.kv)]
        return [(n - 1) * self.shape.page_size + last for n, last in zip(pages, self.last, strict=True)]

    def q_lens(self) -> list[int]:
        """Return each request's queries."""
        return [end - start for start, end in pairwise(self.qo)]


def check_planned(planned: Planned, *, float_bytes: int, int_bytes: int, in_graph: bool) -> None:
    """What every kernel takes for granted of a batch.

    Args:
        planned: The batch.
        float_bytes: Of the workspace for partial results.
        int_bytes: Of the workspace for the schedule.
        in_graph: The wrapper keeps to its buffers.
    """
    shape = planned.shape
    divides = shape.num_kv_heads > 0 and shape.num_qo_heads % shape.num_kv_heads == 0
    demand(divides, f"{shape.num_qo_heads} query heads on {shape.num_kv_heads} KV heads")  # scheduler.cuh
    demand(shape.head_dim in checks.HEAD_DIMS, f"head_dim {shape.head_dim} is not in {checks.HEAD_DIMS}")
    demand(shape.page_size > 0, "page_size must be positive")
    for name, dtype in (("q_data_type", shape.q_dtype), ("kv_data_type", shape.kv_dtype)):
        demand(dtype in checks.HALF_TYPES, f"{name} {dtype} has no kernels")
    demand(shape.q_dtype == shape.kv_dtype, f"q is {shape.q_dtype}, KV {shape.kv_dtype}: not modelled")
    kind = planned.kind
    demand(kind.window_left >= -1, f"window_left {kind.window_left}: -1 is none")  # module: >= 0; decode.py: != -1
    demand(kind.soft_cap >= 0, f"logits_soft_cap {kind.soft_cap} would be ignored")
    demand(len(planned.kv) == len(planned.qo) == len(planned.last) + 1, "indptr and last_page_len disagree on B")
    checks.check_last_page_len(planned.last, shape.page_size)
    demand(planned.qo[-1] > 0, "no query at all")
    for i, (start, end) in enumerate(pairwise(planned.kv)):
        # page.cuh gives it length 0, page.py's get_seq_lens last_page_len: it would attend to nothing.
        demand(end > start, f"request {i} has no page")
    _check_queries_have_keys(planned)
    _check_workspaces(planned, float_bytes, int_bytes, in_graph)


def _check_queries_have_keys(planned: Planned) -> None:
    for i, (q_len, kv_len) in enumerate(zip(planned.q_lens(), planned.kv_lens(), strict=True)):
        fits = q_len <= kv_len or not planned.kind.causal
        demand(fits, f"request {i} has {q_len} queries on {kv_len} keys: append before attention")


def _check_workspaces(planned: Planned, float_bytes: int, int_bytes: int, in_graph: bool) -> None:
    """scheduler.cuh's sums; it raises "Buffer overflow when allocating memory". Its search for a cut is left out."""
    shape = planned.shape
    group = shape.num_qo_heads // shape.num_kv_heads
    batch_size, num_rows = len(planned.last), planned.qo[-1]
    longest = num_rows - batch_size + 1 if in_graph else math.ceil(num_rows / batch_size)
    tile = 16 if longest * group <= 16 else 64 if longest * group <= 64 or shape.head_dim >= 256 else 128
    most_blocks = 2 * NUM_SMS // shape.num_kv_heads
    num_tiles = math.ceil(num_rows * group / tile) + batch_size - 1
    num_blocks = max(most_blocks, num_tiles)
    schedule = 13 * num_blocks + 4 * (batch_size + num_rows) + 256
    demand(schedule <= int_bytes, f"int workspace of {int_bytes} bytes: batch_prefill_request_indices needs {schedule}")
    if not in_graph and num_tiles > most_blocks + batch_size - 1:
        return  # enough work without cutting requests into parts
    needed = shape.num_qo_heads * math.ceil(num_blocks * tile / group) * (shape.head_dim + 1) * 4
    demand(needed <= float_bytes, f"float workspace of {float_bytes} bytes: batch_prefill_tmp_v needs {needed}")


def soft_cap_of(logits_soft_cap: float | None) -> float:
    """None is no cap."""
    return 0.0 if logits_soft_cap is None else float(logits_soft_cap)


def dtype_of(dtype: str | torch.dtype) -> torch.dtype:
    """utils.py's canonicalize_torch_dtype."""
    found = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    demand(isinstance(found, torch.dtype), f"dtype must be a string or torch.dtype, got {dtype!r}")
    return found


def refuse_unmodelled(**options: object) -> None:
    """Options that the fake does not model: raise where one is used."""
    unused = (None, False, "NONE", 0)
    used = [name for name, value in options.items() if isinstance(value, torch.Tensor) or value not in unused]
    demand(not used, f"not modelled by the fake: {', '.join(used)}")
