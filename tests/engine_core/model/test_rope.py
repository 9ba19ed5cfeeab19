"""The table of cosines and sines against transformers' own rotary embedding."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine_core.model.arch import arch_from_config
from engine_core.model.rope import RopeSpec, build_cos_sin

SCALINGS = {
    "none": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 512,
    },
    "yarn": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256},
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 8.0,
        "original_max_position_embeddings": 256,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
        "beta_fast": 16,
        "beta_slow": 2,
    },
}


@pytest.mark.parametrize("head_dim", [16, 128])
@pytest.mark.parametrize("scaling", list(SCALINGS))
def test_against_transformers(scaling: str, head_dim: int) -> None:
    config = LlamaConfig(
        hidden_size=4 * head_dim,
        num_attention_heads=4,
        max_position_embeddings=2048,
        rope_parameters={"rope_theta": 500_000.0, **SCALINGS[scaling]},
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(2048).unsqueeze(0))
    rope = arch_from_config({**config.to_dict(), "architectures": ["LlamaForCausalLM"]}).rope
    table = build_cos_sin(rope, head_dim, 2048)
    half = head_dim // 2
    # Bit by bit, since rounding differences in a frequency grow with the position.
    assert torch.equal(table[:, :half], cos[0, :, :half])
    assert torch.equal(table[:, half:], sin[0, :, :half])


def test_layout() -> None:
    table = build_cos_sin(RopeSpec(theta=100.0), head_dim=4, num_positions=6)
    assert table.shape == (6, 4)
    assert table.dtype == torch.float32
    angles = [5.0, 5.0 / 10.0]  # position 5; the second pair turns theta ** (2 / 4) times slower
    expected = [math.cos(angles[0]), math.cos(angles[1]), math.sin(angles[0]), math.sin(angles[1])]
    torch.testing.assert_close(table[5], torch.tensor(expected))
