"""RMS norms over FlashInfer's kernels, which take a weight of x's dtype only: Gemma's, in fp32, take a way round."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary


class Norms:
    """Norms whose weight has x's dtype or is fp32, computed in fp32 either way.

    The library reads a weight as if it had x's dtype, whatever it has. Its Gemma kernels add 1 to it, in fp32: an fp32
    weight that is 1 + w of a half-precision w, as checkpoints have it, goes to them as that w, without losing a bit.
    Any other goes through torch, an operation at a time.

    Args:
        library: FlashInfer, or what stands for it.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._offsets: Any = WeakIdKeyDictionary()  # from a weight to its w, or to None

    def norm_into(self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """``out = x / rms(x) * weight`` over the last dimension; ``out`` may be x.

        Args:
            out: x's shape and dtype.
            x: [T, H], or [T, num_heads, head_dim] with any distance between tokens.
            weight: [H] or [head_dim].
            eps: Of the norm.
        """
        if weight.dtype == x.dtype:
            self._library.rmsnorm(x, weight, eps, out=out)
        elif (offset := self._offset(weight, x.dtype)) is None:
            wide = x.float()
            out.copy_(wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + eps) * weight)
        elif x.ndim == 2:
            self._library.gemma_rmsnorm(x, offset, eps, out=out)
        else:  # it has no kernel for heads, so they become rows
            out.copy_(self._library.gemma_rmsnorm(x.reshape(-1, x.shape[-1]), offset, eps).view(x.shape))

    def add_norm_(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        """``residual += x; x = norm(residual)`` in place, both [T, H]."""
        if weight.dtype == x.dtype:
            self._library.fused_add_rmsnorm(x, residual, weight, eps)
        elif (offset := self._offset(weight, x.dtype)) is None:
            residual.add_(x)
            self.norm_into(x, residual, weight, eps)
        else:
            self._library.gemma_fused_add_rmsnorm(x, residual, offset, eps)

    def _offset(self, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor | None:
        """Return w where ``weight`` is exactly 1 + w. Waits for the device once a weight: in the first, eager step."""
        if weight not in self._offsets:
            offset = (weight - 1).to(dtype)
            self._offsets[weight] = offset if torch.equal(offset.float() + 1, weight) else None
        found: torch.Tensor | None = self._offsets[weight]
        return found
