"""Chance without state: a number for each (seed, output index, purpose, token id), wherever one asks for it."""

from __future__ import annotations

import enum
import hashlib
import struct
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatRow: TypeAlias = NDArray[np.float32]
IdRow: TypeAlias = NDArray[np.uint32]

_BELOW_ONE = np.float32(1 - 2**-24)
_KEY = struct.Struct("<QQB")
_LOW_64_BITS = 2**64 - 1


class DrawPurpose(enum.IntEnum):
    """What a random number is for: draws for different purposes never share one."""

    SAMPLE = 0


def exponentials(seed: int, output_index: int, purpose: DrawPurpose, token_ids: IdRow) -> FloatRow:
    """Return an exponentially distributed number for each token: positive, finite, of mean 1.

    A token's number does not depend on which others are asked about.

    Args:
        seed: Its low 64 bits count.
        output_index: From 0.
        purpose: What it is for.
        token_ids: [n].
    """
    u = uniforms(seed, output_index, purpose, token_ids)
    np.negative(u, out=u)
    np.log1p(u, out=u)
    return np.negative(u, out=u)


def uniforms(seed: int, output_index: int, purpose: DrawPurpose, token_ids: IdRow) -> FloatRow:
    """Return a number in (0, 1) for each token: 32 bits at the small end, where a race is won, 24 at the large end."""
    u = _hash(_key(seed, output_index, purpose), token_ids).astype(np.float32)
    u += np.float32(0.5)
    u *= np.float32(2**-32)
    return np.minimum(u, _BELOW_ONE, out=u)


def key_bytes(seed: int, output_index: int, purpose: DrawPurpose) -> bytes:
    """Return three little-endian 32-bit words that differ wholly wherever an argument differs."""
    data = _KEY.pack(seed & _LOW_64_BITS, output_index, purpose)
    return hashlib.blake2b(data, digest_size=12).digest()


def _key(seed: int, output_index: int, purpose: DrawPurpose) -> IdRow:
    return np.frombuffer(key_bytes(seed, output_index, purpose), "<u4").astype(np.uint32)


def _hash(key: IdRow, token_ids: IdRow) -> IdRow:
    """Two rounds of a 32-bit finaliser with a word of the key before, between and after them.

    Every step can be undone, so two tokens of one draw never share a number.

    Source: the multipliers and shifts of MurmurHash3's fmix32, and of Chris Wellons's search for better ones.
    """
    h: IdRow = token_ids ^ key[0]
    _mix(h, (16, 0x85EBCA6B, 13, 0xC2B2AE35, 16))
    h += key[1]
    _mix(h, (16, 0x7FEB352D, 15, 0x846CA68B, 16))
    h ^= key[2]
    return h


def _mix(h: IdRow, steps: tuple[int, int, int, int, int]) -> None:
    first, multiplier, second, other_multiplier, third = map(np.uint32, steps)
    scratch = h >> first
    h ^= scratch
    h *= multiplier
    h ^= np.right_shift(h, second, out=scratch)
    h *= other_multiplier
    h ^= np.right_shift(h, third, out=scratch)
