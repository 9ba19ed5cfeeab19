"""Rotary position embedding: its parameters and the table of cosines and sines. Knows no config file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch

RopeScalingKind = Literal["none", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary position embedding over the whole head, halves rotated (not interleaved).

    Attributes:
        theta: Base of the frequencies.
        scaling: How positions beyond the trained range are mapped.
        factor: Of ``linear``, ``llama3`` and ``yarn``.
        low_freq_factor: ``llama3``.
        high_freq_factor: ``llama3``.
        original_max_position: ``llama3`` and ``yarn``: the context before scaling, in tokens.
        beta_fast: ``yarn``.
        beta_slow: ``yarn``.
        attention_factor: ``yarn``: multiplies cos and sin.
    """

    theta: float
    scaling: RopeScalingKind = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 1.0
    original_max_position: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0


def build_cos_sin(rope: RopeSpec, head_dim: int, num_positions: int) -> torch.Tensor:
    """Return the table for positions ``0 .. num_positions-1``.

    Returns:
        [num_positions, head_dim] fp32: cos of the head_dim/2 angles, then their sin.
    """
    positions = torch.arange(num_positions, dtype=torch.float32)
    angles = torch.outer(positions, inverse_frequencies(rope, head_dim))
    return torch.cat((angles.cos(), angles.sin()), dim=1).mul_(rope.attention_factor)


def inverse_frequencies(rope: RopeSpec, head_dim: int) -> torch.Tensor:
    """Return the angle per position of each pair: [head_dim // 2], fp32.

    The formulas round as the usual implementations do: at position 100,000 a frequency's last bit is 0.01 rad.
    """
    base = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    if rope.scaling == "none":
        return 1.0 / base
    if rope.scaling == "linear":
        return 1.0 / base / rope.factor
    if rope.scaling == "llama3":
        return _llama3(rope, 1.0 / base)
    return _yarn(rope, base, head_dim)


def _llama3(rope: RopeSpec, frequencies: torch.Tensor) -> torch.Tensor:
    """Keep high frequencies, divide low ones by the factor, blend in between.

    Source: Llama 3.1's reference code, ``apply_scaling``.
    """
    turns = rope.original_max_position / (2 * math.pi / frequencies)  # over the original context
    span = rope.high_freq_factor - rope.low_freq_factor
    keep = ((turns - rope.low_freq_factor) / span).clamp(0.0, 1.0)
    return (1.0 - keep) * frequencies / rope.factor + keep * frequencies


def _yarn(rope: RopeSpec, base: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Blend by pair index between the frequencies as trained and those divided by the factor.

    Source: Peng et al., YaRN (arXiv 2309.00071), section 3.2.
    """

    def pair_that_turns(times: float) -> float:
        return head_dim * math.log(rope.original_max_position / (times * 2 * math.pi)) / (2 * math.log(rope.theta))

    low = max(math.floor(pair_that_turns(rope.beta_fast)), 0)
    high = min(math.ceil(pair_that_turns(rope.beta_slow)), head_dim - 1)
    pairs = torch.arange(head_dim // 2, dtype=torch.float32)
    keep = 1.0 - ((pairs - low) / max(high - low, 0.001)).clamp(0.0, 1.0)
    return 1.0 / (rope.factor * base) * (1.0 - keep) + 1.0 / base * keep
