"""The fake FlashInfer's merging of attention over two sets of keys (cascade.py, cascade.cu)."""

from __future__ import annotations

import math

import torch

from kernels.testing import fake_checks as checks
from kernels.testing.device_calls import device_call
from kernels.testing.fake_attention import merge
from kernels.testing.fake_checks import demand


def merge_state(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention over both sets of keys: [T, H, D] in v_a's dtype, and [T, H] fp32, base 2."""
    _check_states(v_a, s_a, v_b, s_b)
    return device_call(_merged, v_a, s_a, v_b, s_b)


def merge_state_in_place(
    v: torch.Tensor,
    s: torch.Tensor,
    v_other: torch.Tensor,
    s_other: torch.Tensor,
    mask: torch.Tensor | None = None,
) -> None:
    """Merge another set's attention into ``v`` and ``s``."""
    demand(mask is None, "mask is not modelled")
    _check_states(v, s, v_other, s_other)
    for x in (v_other, s_other):
        apart = not any(checks.overlaps(x, target) for target in (v, s))
        demand(apart, "the states overlap: one is read while the other is written")
    device_call(_merge_into, v, s, v_other, s_other)


def _check_states(v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor) -> None:
    demand(v_a.ndim == 3 and s_a.ndim == 2, "v must be [T, H, D] and s [T, H]")  # cascade.cu
    same = v_a.shape == v_b.shape and s_a.shape == s_b.shape == v_a.shape[:2]
    demand(same, f"states of {tuple(v_a.shape)} {tuple(s_a.shape)} and {tuple(v_b.shape)} {tuple(s_b.shape)}")
    contiguous = all(x.is_contiguous() for x in (v_a, s_a, v_b, s_b))
    demand(contiguous, "states must be contiguous")  # cascade.cu
    # cascade.cu takes v_b for v_a's type, unchecked.
    demand(v_a.dtype == v_b.dtype and v_a.dtype in checks.HALF_TYPES, f"v of {v_a.dtype} and {v_b.dtype}")
    # cascade.py converts: in place, the result then lands in the copy.
    demand(s_a.dtype == s_b.dtype == torch.float32, f"s must be float32, is {s_a.dtype} and {s_b.dtype}")


def _merged(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    blind = bool(((s_a == -math.inf) & (s_b == -math.inf)).any())
    demand(not blind, "a query that sees no key of either set: the result is NaN")  # cascade.cuh
    v, s = merge(v_a, s_a, v_b, s_b)
    return v.to(v_a.dtype), s


def _merge_into(v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor) -> None:
    merged_v, merged_s = _merged(v, s, v_other, s_other)
    v.copy_(merged_v)
    s.copy_(merged_s)
