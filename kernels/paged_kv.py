"""PagedKV: the page pool of the backends that keep K and V in plain torch tensors on the CPU.

Owns the layout, [num_pages, page_size, num_kv_heads, head_dim] for each layer's K and V; knows no attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.step import AttnSpec, IntArray


def page_bytes(layer_specs: Sequence[AttnSpec], *, page_size: int, dtype: torch.dtype) -> int:
    """Return the bytes of one page, K and V, over all layers."""
    per_token = sum(2 * spec.num_kv_heads * spec.head_dim for spec in layer_specs)
    return per_token * page_size * dtype.itemsize


def to_index(ids: IntArray) -> torch.Tensor:
    """Return host ids as the int64 tensor that torch indexes with."""
    return torch.from_numpy(ids.astype(np.int64))


def _lazy_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros whose memory the kernel gives out page by page as it is written; torch.zeros would touch all of it now."""
    return torch.from_numpy(np.zeros((*shape[:-1], shape[-1] * dtype.itemsize), np.uint8)).view(dtype)


class PagedKV:
    """A KVPool of torch tensors, zero at first: a page never written reads as zeros, not as NaN.

    Attributes:
        layer_specs: One per layer.
        page_size: Tokens a page.
        num_pages: Pages in the pool.
        page_bytes: Bytes of one page over all layers, K and V.
        dtype: Of K and V.
    """

    def __init__(self, layer_specs: Sequence[AttnSpec], *, num_pages: int, page_size: int, dtype: torch.dtype) -> None:
        self.layer_specs = tuple(layer_specs)
        self.page_size = page_size
        self.num_pages = num_pages
        self.page_bytes = page_bytes(self.layer_specs, page_size=page_size, dtype=dtype)
        self.dtype = dtype
        shapes = [(num_pages, page_size, spec.num_kv_heads, spec.head_dim) for spec in self.layer_specs]
        self._keys = [_lazy_zeros(shape, dtype) for shape in shapes]
        self._values = [_lazy_zeros(shape, dtype) for shape in shapes]

    def append(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Write k and v, [T, num_kv_heads, head_dim], at ``slots``, [T] int64 (``page * page_size + offset``)."""
        self._keys[layer].flatten(0, 1).index_copy_(0, slots, k)
        self._values[layer].flatten(0, 1).index_copy_(0, slots, v)

    def gather(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy pages, [n] ids, into contiguous K and V: [n * page_size, num_kv_heads, head_dim] each."""
        keys = self._keys[layer].index_select(0, pages).flatten(0, 1)
        return keys, self._values[layer].index_select(0, pages).flatten(0, 1)

    def copy_pages(self, src: IntArray, dst: IntArray) -> None:
        """Copy whole pages, all layers. ``src`` and ``dst``: [n] page ids, disjoint."""
        src_ids, dst_ids = to_index(src), to_index(dst)
        for cache in (*self._keys, *self._values):
            cache.index_copy_(0, dst_ids, cache.index_select(0, src_ids))

    def read_page(self, page: int, out: memoryview) -> None:
        """Write one page's bytes into ``out``: layer by layer, K then V.

        Raises:
            ValueError: ``out`` is not ``page_bytes`` long.
        """
        self._check_length(out)
        buffer = np.frombuffer(out, dtype=np.uint8)
        for offset, part in self._parts(page):
            buffer[offset : offset + part.size] = part

    def write_page(self, page: int, data: memoryview) -> None:
        """Fill one page from bytes that ``read_page`` of a pool of the same shape gave.

        Raises:
            ValueError: ``data`` is not ``page_bytes`` long.
        """
        self._check_length(data)
        buffer = np.frombuffer(data, dtype=np.uint8)
        for offset, part in self._parts(page):
            part[:] = buffer[offset : offset + part.size]

    def _parts(self, page: int) -> list[tuple[int, NDArray[np.uint8]]]:
        parts, offset = [], 0
        for keys, values in zip(self._keys, self._values, strict=True):
            for cache in (keys, values):
                part: NDArray[np.uint8] = cache[page].view(torch.uint8).flatten().numpy()
                parts.append((offset, part))
                offset += part.size
        return parts

    def _check_length(self, buffer: memoryview) -> None:
        if buffer.nbytes != self.page_bytes:
            raise ValueError(f"a page of this pool is {self.page_bytes} bytes long, the buffer {buffer.nbytes}")
