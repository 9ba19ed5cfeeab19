"""Logits to token ids. A row's result depends on that row, its parameters and its output index, and on nothing else."""

from __future__ import annotations

import enum
import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from engine_core.sampling_params import SamplingParams

# Nucleus sampling sorts this many likeliest tokens first; only a flat distribution needs the whole vocabulary.
_NUCLEUS_CANDIDATES = 1024


class DrawPurpose(enum.IntEnum):
    """What a random number is for: draws for different purposes never share one."""

    SAMPLE = 0


@dataclass(frozen=True, slots=True)
class Samples:
    """Attributes:
    token_ids: [R]; meaningless where ``is_valid`` is False.
    is_valid: [R], False where the row's logits are not all finite.
    """

    token_ids: list[int]
    is_valid: list[bool]


def uniform(seed: int, output_index: int, purpose: DrawPurpose) -> float:
    """Return a number in [0, 1) that is a function of its arguments: 52 bits of a keyed hash."""
    key = struct.pack("<QQB", seed & (2**64 - 1), output_index, purpose)
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 12) / 2**52


def sample(logits: torch.Tensor, params: Sequence[SamplingParams], output_indices: Sequence[int]) -> Samples:
    """Pick one token a row.

    Args:
        logits: [R, vocab], fp32, raw.
        params: [R].
        output_indices: [R], how many output tokens each request has so far.
    """
    is_valid = torch.isfinite(logits).all(dim=-1).tolist()
    token_ids: list[int] = logits.argmax(dim=-1).tolist()
    for row, (param, index) in enumerate(zip(params, output_indices, strict=True)):
        if param.temperature > 0.0 and is_valid[row]:
            token_ids[row] = _draw(logits[row], param, uniform(param.seed, index, DrawPurpose.SAMPLE))
    return Samples(token_ids, is_valid)


def _draw(logits: torch.Tensor, params: SamplingParams, point: float) -> int:
    """Inverse-transform sampling of one row at ``point`` of its cumulative distribution.

    Args:
        logits: [vocab], fp32, finite.
        params: ``temperature`` above 0.
        point: In [0, 1).
    """
    # The maximum is subtracted first: a tiny temperature must not overflow to inf.
    probs = torch.softmax((logits - logits.max()).double() / params.temperature, dim=-1)
    if params.top_k == 0 and params.top_p >= 1.0:
        return _pick(probs, point)
    kept, token_ids = _likeliest(probs, params)
    return int(token_ids[_pick(kept, point)])


def _likeliest(probs: torch.Tensor, params: SamplingParams) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probabilities and ids that top_k, then top_p leave, likeliest first."""
    vocab = probs.shape[-1]
    num = min(params.top_k or _NUCLEUS_CANDIDATES, vocab)
    kept, token_ids = probs.topk(num)
    total = float(kept.sum()) if params.top_k else 1.0
    if params.top_p >= 1.0:
        return kept, token_ids
    cumulative = kept.cumsum(0)
    if num < vocab and not params.top_k and float(cumulative[-1]) < params.top_p:
        kept, token_ids = probs.sort(descending=True, stable=True)
        cumulative = kept.cumsum(0)
    # A token stays while those before it have not reached top_p of what top_k left.
    # The first always does: where top_p is so small that the product is 0, the test would not say so.
    num_kept = max(1, int((cumulative - kept < params.top_p * total).sum()))
    return kept[:num_kept], token_ids[:num_kept]


def _pick(probs: torch.Tensor, point: float) -> int:
    cumulative = probs.cumsum(0)
    index = torch.searchsorted(cumulative, cumulative[-1] * point, right=True)
    return min(int(index), probs.shape[-1] - 1)
