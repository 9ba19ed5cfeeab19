"""What FlashInfer 0.7.4 takes for granted, said aloud: each check names what the real library would do instead.

Files named here are the real package's. "Unchecked there" means wrong results or a fault on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

HALF_TYPES = (torch.float16, torch.bfloat16)
# utils.cuh, DISPATCH_HEAD_DIM: append and rope know these and 512. Attention of 512 is another family of kernels.
HEAD_DIMS = (64, 128, 256)
ALIGNMENT = 16  # bytes: vec_dtypes.cuh loads 128 bits at once


class MisuseError(ValueError):
    """A call that the real library would refuse, fault on, or answer with wrong numbers."""


def demand(fine: bool, message: str) -> None:
    """Raise MisuseError with the message unless ``fine``."""
    if not fine:
        raise MisuseError(message)


def check_vector_loads(name: str, x: torch.Tensor) -> None:
    """Rows that a kernel reads 16 bytes at a time. Unchecked there but for some last dimensions."""
    demand(x.stride(-1) == 1, f"{name} must be contiguous at its last dimension")  # tvm_ffi_utils.h
    strides = [
        stride * x.element_size() for stride, size in zip(x.stride()[:-1], x.shape[:-1], strict=True) if size > 1
    ]
    aligned = x.data_ptr() % ALIGNMENT == 0 and all(stride % ALIGNMENT == 0 for stride in strides)
    demand(aligned, f"{name} has rows that are not {ALIGNMENT}-byte aligned")


def check_int32(name: str, x: torch.Tensor, *, ndim: int = 1) -> None:
    """An index array. jit/attention: the id type is a template argument; page.py: others are converted each call."""
    demand(x.dtype == torch.int32, f"{name} must be int32, is {x.dtype}")
    demand(x.ndim == ndim, f"{name} must have {ndim} dimension, has {x.ndim}")
    demand(x.is_contiguous(), f"{name} must be contiguous")  # raw pointers; prefill.py copies it where it is not


def shares_memory(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether both are views of one allocation."""
    return x.untyped_storage().data_ptr() == y.untyped_storage().data_ptr() and x.numel() > 0 and y.numel() > 0


def overlaps(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether both touch a common byte, taking a view as all bytes from its first to its last."""

    def span(tensor: torch.Tensor) -> tuple[int, int]:
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()

    if x.numel() == 0 or y.numel() == 0:
        return False
    (x_start, x_end), (y_start, y_end) = span(x), span(y)
    if x_start >= y_end or y_start >= x_end:
        return False
    return not _are_columns_apart(x, y)


def _are_columns_apart(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether both are columns of one matrix, apart from each other, as q and k are of a fused projection."""
    if x.ndim < 2 or y.ndim < 2 or x.stride(0) != y.stride(0) or x.element_size() != y.element_size():
        return False
    row = x.stride(0) * x.element_size()
    x_width, y_width = x[0].numel() * x.element_size(), y[0].numel() * y.element_size()
    x_to_y, y_to_x = (y.data_ptr() - x.data_ptr()) % row, (x.data_ptr() - y.data_ptr()) % row
    return x_to_y >= x_width and y_to_x >= y_width


def check_indptr(name: str, indptr: torch.Tensor, *, devices: Sequence[torch.Tensor] = ()) -> list[int]:
    """Return a host array of offsets as a list. scheduler.cuh reads it on the host, through a raw pointer.

    Args:
        name: For the message.
        indptr: [B+1] int32.
        devices: Tensors known to be on the device: a view of their memory would be, too.
    """
    check_host(name, indptr, devices)
    offsets = indptr.tolist()
    demand(len(offsets) >= 2, f"{name} must describe at least one request")  # scheduler.cuh divides by their number
    demand(offsets[0] == 0, f"{name} must start at 0, starts at {offsets[0]}")
    rises = all(start <= end for start, end in pairwise(offsets))
    demand(rises, f"{name} must not fall: {offsets}")  # scheduler.cuh: "should be non-negative"
    return [int(offset) for offset in offsets]


def check_host(name: str, x: torch.Tensor, devices: Sequence[torch.Tensor]) -> None:
    """An int32 array on the host. From the device, decode.py and prefill.py fetch it by .to("cpu"): a hidden wait."""
    check_int32(name, x)
    on_host = x.device.type == "cpu" and not any(shares_memory(x, device) for device in devices)
    demand(on_host, f"{name} is on the device: plan() would wait for all queued work to read it")


def check_pages(indices: torch.Tensor, kv_offsets: list[int]) -> None:
    """Page ids as planned. Their range is known at run only. Unchecked there."""
    check_int32("kv_indices", indices)
    num_pages = kv_offsets[-1]
    demand(len(indices) >= num_pages, f"kv_indices has {len(indices)} pages, kv_indptr names {num_pages}")
    demand(len(indices) == num_pages, f"kv_indices has {len(indices)} pages, more than kv_indptr's {num_pages}")


def check_last_page_len(last_page_len: list[int], page_size: int) -> None:
    """Unchecked there: 0 or more than a page make kv_len wrong."""
    fine = all(1 <= length <= page_size for length in last_page_len)
    demand(fine, f"last_page_len must be 1..{page_size}: {last_page_len}")


def check_workspace(name: str, workspace: torch.Tensor) -> None:
    """The caller's scratch memory."""
    demand(workspace.dtype == torch.uint8, f"{name} must be uint8, is {workspace.dtype}")  # wrappers' docstrings
    demand(workspace.ndim == 1 and workspace.is_contiguous(), f"{name} must be one contiguous row")
    demand(workspace.data_ptr() % ALIGNMENT == 0, f"{name} must be 16-byte aligned")  # utils.py


def check_pool(pool: object, page_size: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a layer's pages: [num_pages, 2, page_size, num_kv_heads, head_dim]. utils.py takes more layouts."""
    if not isinstance(pool, torch.Tensor):
        raise MisuseError("paged_kv_cache must be one 5-D tensor: the layout that the modules are built for")
    demand(pool.ndim == 5, f"paged_kv_cache must be 5-D, has {pool.ndim} dimensions")
    demand(pool.dtype in HALF_TYPES, f"paged_kv_cache of {pool.dtype}: no kernels")  # tvm_ffi_utils.h: fp16, bf16, fp8
    demand(pool.dtype == dtype, f"paged_kv_cache is {pool.dtype}, planned {dtype}")  # utils.py
    expected = (2, page_size, num_kv_heads, head_dim)
    # Strides and page size come from this tensor, heads from the plan: unchecked there.
    demand(tuple(pool.shape[1:]) == expected, f"paged_kv_cache pages are {tuple(pool.shape[1:])}, planned {expected}")
    demand(pool.is_contiguous(), "paged_kv_cache must be contiguous")  # else its rows may not load as vectors
    check_vector_loads("paged_kv_cache", pool)
    return pool


def check_page_ids(indices: torch.Tensor, kv_offsets: list[int], num_pages: int) -> None:
    """Page ids as the kernel reads them. Unchecked there: they become addresses."""
    ids = indices[: kv_offsets[-1]].tolist()
    outside = [page for page in ids if not 0 <= page < num_pages]
    demand(not outside, f"kv_indices names pages outside of the pool's {num_pages}: {outside[:4]}")
    for i, (start, end) in enumerate(pairwise(kv_offsets)):
        table = ids[start:end]
        demand(len(set(table)) == len(table), f"request {i} has a page twice: {table[:8]}")
