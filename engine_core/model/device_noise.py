"""The numbers of noise.py, made on the device for a whole batch: the same bits for the same (seed, output index, id).

Torch has no full uint32: words are int32, whose sums and products wrap as those of uint32 do, and whose right shifts
are masked. All kernels, no host waits.
"""

from __future__ import annotations

import torch

_BELOW_ONE = 1 - 2**-24


def exponentials(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return an exponentially distributed number for each row and token; noise.exponentials()' to the last bit or so.

    Args:
        keys: [n, 3] int32, the words of each row's key: noise.key_bytes().
        token_ids: [V] or [n, V] int32.

    Returns:
        [n, V] fp32.
    """
    h = hash_ids(keys, token_ids)
    # A uint32 as the fp32 nearest to it: both halves are exact, so their sum is rounded once.
    u = _shifted_right(h, 16).to(torch.float32)
    u.mul_(65536.0).add_(h.bitwise_and_(0xFFFF))
    u.add_(0.5).mul_(2.0**-32).clamp_max_(_BELOW_ONE)
    return u.neg_().log1p_().neg_()


def hash_ids(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Return noise.py's 32 bits for each row and token: [n, V] int32, bit for bit; arguments as of exponentials()."""
    first, second, third = keys.unsqueeze(2).unbind(1)
    h = token_ids ^ first
    scratch = torch.empty_like(h)
    _mix_(h, (16, 0x85EBCA6B, 13, 0xC2B2AE35, 16), scratch)
    h.add_(second)
    _mix_(h, (16, 0x7FEB352D, 15, 0x846CA68B, 16), scratch)
    return h.bitwise_xor_(third)


def _mix_(h: torch.Tensor, steps: tuple[int, int, int, int, int], scratch: torch.Tensor) -> None:
    first, multiplier, second, other_multiplier, third = steps
    assert first == third == 16
    _fold_(h)
    h.mul_(_signed(multiplier))
    h.bitwise_xor_(_shifted_right(h, second, scratch))
    h.mul_(_signed(other_multiplier))
    _fold_(h)


def _fold_(h: torch.Tensor) -> None:
    """``h ^= h >> 16``: the upper half of each word, which stands behind, into the lower. One kernel, not three."""
    halves = h.view(torch.int16)
    halves[:, 0::2].bitwise_xor_(halves[:, 1::2])


def _shifted_right(h: torch.Tensor, num_bits: int, out: torch.Tensor | None = None) -> torch.Tensor:
    """Shift in zeros, as for an unsigned word."""
    return torch.bitwise_right_shift(h, num_bits, out=out).bitwise_and_((1 << (32 - num_bits)) - 1)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >= 1 << 31 else word
