"""ArchSpec: one frozen description per checkpoint, from which the one decoder is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from kernels.backend import Activation

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


@dataclass(frozen=True, slots=True)
class ArchSpec:
    """A decoder-only transformer.

    Attributes:
        architecture: The checkpoint's own name, such as ``LlamaForCausalLM``.
        vocab_size: Rows of the embedding.
        hidden_size: H.
        num_layers: Decoder layers.
        num_q_heads: Query heads.
        num_kv_heads: Key and value heads.
        head_dim: Width of one head.
        intermediate_size: I, width of the MLP.
        rms_norm_eps: Of every norm.
        max_position_embeddings: Trained context, in tokens.
        tie_word_embeddings: The embedding is the output head too.
        activation: Of the gated MLP.
        qkv_bias: Biases on q, k and v.
        o_bias: Bias on the attention's output.
        mlp_bias: Biases in the MLP.
        qk_norm: A norm on each head of q and k.
        norm_unit_offset: Checkpoint norms are stored as ``w - 1`` (Gemma).
        post_norms: Norms also after attention and MLP (Gemma 2, 3).
        embed_scale: Factor on the embedding's rows.
        sm_scale: Factor on q·k.
        attn_soft_cap: Soft cap on attention scores; 0 = off.
        final_soft_cap: Soft cap on the logits; 0 = off.
        windows: Per layer, ``window_left`` of AttnSpec; -1 = full attention.
        rope: Of full-attention layers.
        local_rope: Of window layers where it differs (Gemma 3), else None.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    activation: Activation
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    norm_unit_offset: bool
    post_norms: bool
    embed_scale: float
    sm_scale: float
    attn_soft_cap: float
    final_soft_cap: float
    windows: tuple[int, ...]
    rope: RopeSpec
    local_rope: RopeSpec | None
