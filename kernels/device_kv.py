"""DeviceKV: the page pool of a backend that computes on an accelerator.

Owns the layout that FlashInfer reads, one tensor a layer, [num_pages, 2, page_size, num_kv_heads, head_dim] with K
before V (NHD); knows no attention.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from kernels.paged_kv import page_bytes, to_index
from kernels.step import AttnSpec, IntArray


class DeviceKV:
    """A KVPool on a device, zero at first: a page never written reads as zeros, not as NaN.

    It may be made, and written, in inference mode and outside.

    Attributes:
        layer_specs: One per layer.
        page_size: Tokens a page.
        num_pages: Pages in the pool.
        page_bytes: Bytes of one page over all layers, K and V.
        dtype: Of K and V.
        kinds: Of attention among the layers, each once.
        layers: [num_pages, 2, page_size, num_kv_heads, head_dim] a layer.
    """

    def __init__(
        self,
        layer_specs: Sequence[AttnSpec],
        *,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.layer_specs = tuple(layer_specs)
        self.kinds = tuple(dict.fromkeys(self.layer_specs))
        self.page_size = page_size
        self.num_pages = num_pages
        self.page_bytes = page_bytes(self.layer_specs, page_size=page_size, dtype=dtype)
        self.dtype = dtype
        self.layers = tuple(
            torch.zeros(num_pages, 2, page_size, spec.num_kv_heads, spec.head_dim, dtype=dtype, device=device)
            for spec in self.layer_specs
        )

    @torch.inference_mode()
    def copy_pages(self, src: IntArray, dst: IntArray) -> None:
        """Copy whole pages, all layers. ``src`` and ``dst``: [n] page ids, disjoint."""
        src_ids, dst_ids = (to_index(ids).to(self._device) for ids in (src, dst))
        for pages in self.layers:
            pages.index_copy_(0, dst_ids, pages.index_select(0, src_ids))

    def read_page(self, page: int, out: memoryview) -> None:
        """Write one page's bytes into ``out``: layer by layer, K then V. Waits for the device.

        Raises:
            ValueError: ``out`` is not ``page_bytes`` long.
        """
        self._check_length(out)
        parts = [pages[page].view(torch.uint8).flatten() for pages in self.layers]
        np.frombuffer(out, dtype=np.uint8)[:] = torch.cat(parts).cpu().numpy()

    @torch.inference_mode()
    def write_page(self, page: int, data: memoryview) -> None:
        """Fill one page from bytes that ``read_page`` of a pool of the same shape gave.

        Raises:
            ValueError: ``data`` is not ``page_bytes`` long.
        """
        self._check_length(data)
        buffer = torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy()).to(self._device)
        offset = 0
        for target in (pages[page] for pages in self.layers):
            target.copy_(buffer[offset : offset + target.nbytes].view(self.dtype).view(target.shape))
            offset += target.nbytes

    @property
    def _device(self) -> torch.device:
        return self.layers[0].device

    def _check_length(self, buffer: memoryview) -> None:
        if buffer.nbytes != self.page_bytes:
            raise ValueError(f"a page of this pool is {self.page_bytes} bytes long, the buffer {buffer.nbytes}")
