"""ArchSpec: one frozen description per checkpoint, from which the one decoder is built, and how a config becomes one.

Knows Hugging Face's config.json, no tensors. A new family is one short function and one line in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from engine_core.errors import CheckpointError
from engine_core.model.config_fields import ConfigFields
from engine_core.model.rope import RopeSpec
from engine_core.model.rope_config import rope_from_config, ropes_by_layer_type
from kernels.backend import Activation, AttnSpec


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
        max_position_embeddings: Longest context, in tokens: as trained, or as YaRN stretches it.
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


def attn_specs(arch: ArchSpec) -> tuple[AttnSpec, ...]:
    """Return what the backend must know of each layer's attention, in order."""
    return tuple(
        AttnSpec(arch.num_q_heads, arch.num_kv_heads, arch.head_dim, arch.sm_scale, window, arch.attn_soft_cap)
        for window in arch.windows
    )


def arch_from_config(config: Mapping[str, Any]) -> ArchSpec:
    """Return the ArchSpec of a Hugging Face config.json.

    Raises:
        CheckpointError: The architecture is not among the supported ones (the message lists them), a key is missing or
            ill-typed, or the config asks for something that the decoder does not do.
    """
    fields = ConfigFields(config, "config.json")
    names = fields.texts("architectures") or []
    name = next((name for name in names if name in _FAMILIES), None)
    if name is None:
        found = ", ".join(names) if names else "no architecture"
        raise CheckpointError(f"The checkpoint's config names {found}; supported are {', '.join(_FAMILIES)}.")
    quantization = fields.section("quantization_config")
    if quantization is not None:
        method = quantization.raw.get("quant_method", "of an unnamed kind")
        raise CheckpointError(
            f"The weights are quantised ({method}); take the unquantised checkpoint or a GGUF of it instead."
        )
    family, defaults = _FAMILIES[name]
    return _checked(replace(family(fields.with_defaults({**_DEFAULTS, **defaults})), architecture=name))


def _llama(fields: ConfigFields) -> ArchSpec:
    bias = fields.flag("attention_bias")
    return replace(
        _base(fields, rope_from_config(fields)), qkv_bias=bias, o_bias=bias, mlp_bias=fields.flag("mlp_bias")
    )


def _mistral(fields: ConfigFields) -> ArchSpec:
    base = _base(fields, rope_from_config(fields))
    window = fields.optional_int("sliding_window")
    kind = _FULL if window is None else _WINDOW
    return replace(base, windows=_windows(fields, window, [kind] * base.num_layers))


def _qwen2(fields: ConfigFields) -> ArchSpec:
    base = _base(fields, rope_from_config(fields))
    window = fields.optional_int("sliding_window") if fields.flag("use_sliding_window") else None
    first = base.num_layers if window is None else fields.optional_int("max_window_layers") or 0
    kinds = [_FULL if layer < first else _WINDOW for layer in range(base.num_layers)]
    return replace(base, qkv_bias=True, windows=_windows(fields, window, kinds))


def _qwen3(fields: ConfigFields) -> ArchSpec:
    bias = fields.flag("attention_bias")
    return replace(_qwen2(fields), qkv_bias=bias, o_bias=bias, qk_norm=True)


def _gemma3(fields: ConfigFields) -> ArchSpec:
    if fields.flag("use_bidirectional_attention"):
        raise CheckpointError(
            f"{fields.origin} sets use_bidirectional_attention: this is an encoder and does not generate text."
        )
    rope, local_rope = ropes_by_layer_type(fields, theta=1_000_000.0, local_theta=10_000.0)
    base = _base(fields, rope, activation_key="hidden_activation")
    every = fields.count(
        "_sliding_window_pattern" if "_sliding_window_pattern" in fields.raw else "sliding_window_pattern"
    )
    kinds = [_WINDOW if (layer + 1) % every else _FULL for layer in range(base.num_layers)]
    bias = fields.flag("attention_bias")
    return replace(
        base,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        norm_unit_offset=True,
        post_norms=True,
        embed_scale=base.hidden_size**0.5,
        sm_scale=fields.positive("query_pre_attn_scalar") ** -0.5,
        attn_soft_cap=fields.optional_number("attn_logit_softcapping") or 0.0,
        final_soft_cap=fields.optional_number("final_logit_softcapping") or 0.0,
        windows=_windows(fields, fields.optional_int("sliding_window"), kinds),
        local_rope=None if local_rope == rope else local_rope,
    )


def _gemma3_with_vision(fields: ConfigFields) -> ArchSpec:
    """Take the text half: a prompt without images never reaches the other."""
    text = fields.section("text_config")
    if text is None:
        raise fields.error("text_config", "an object")
    tie = {"tie_word_embeddings": fields.flag("tie_word_embeddings")}
    return _gemma3(ConfigFields({**text.raw, **tie}, text.origin).with_defaults({**_DEFAULTS, **_GEMMA3_DEFAULTS}))


def _base(fields: ConfigFields, rope: RopeSpec, activation_key: str = "hidden_act") -> ArchSpec:
    """Read what every family spells alike: a model without biases, further norms, caps and windows."""
    num_q_heads = fields.count("num_attention_heads")
    head_dim = fields.optional_int("head_dim") or fields.count("hidden_size") // num_q_heads
    return ArchSpec(
        architecture="",
        vocab_size=fields.count("vocab_size"),
        hidden_size=fields.count("hidden_size"),
        num_layers=fields.num_layers("num_hidden_layers"),
        num_q_heads=num_q_heads,
        num_kv_heads=fields.optional_int("num_key_value_heads") or num_q_heads,
        head_dim=head_dim,
        intermediate_size=fields.count("intermediate_size"),
        rms_norm_eps=fields.positive("rms_norm_eps"),
        max_position_embeddings=_longest_context(fields, rope),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        activation=_activation(fields, activation_key),
        qkv_bias=False,
        o_bias=False,
        mlp_bias=False,
        qk_norm=False,
        norm_unit_offset=False,
        post_norms=False,
        embed_scale=1.0,
        sm_scale=max(head_dim, 1) ** -0.5,
        attn_soft_cap=0.0,
        final_soft_cap=0.0,
        windows=(-1,) * fields.num_layers("num_hidden_layers"),
        rope=rope,
        local_rope=None,
    )


def _longest_context(fields: ConfigFields, rope: RopeSpec) -> int:
    """Return the context in tokens. Configs that switch YaRN on often keep the unscaled number."""
    declared = fields.count("max_position_embeddings")
    return max(declared, int(rope.factor * rope.original_max_position)) if rope.scaling == "yarn" else declared


def _activation(fields: ConfigFields, key: str) -> Activation:
    name = fields.text(key)
    if name not in _ACTIVATIONS:
        raise CheckpointError(f"{fields.origin}: {key} {name!r} is not supported; use {', '.join(_ACTIVATIONS)}.")
    return _ACTIVATIONS[name]


def _windows(fields: ConfigFields, window: int | None, kinds: list[str]) -> tuple[int, ...]:
    """Return ``window_left`` per layer. A window of W tokens counts the query itself, ``window_left`` does not."""
    kinds = fields.texts("layer_types") or kinds
    unknown = sorted(set(kinds) - {_FULL, _WINDOW})
    if unknown:
        raise CheckpointError(f"{fields.origin}: layer_types holds {', '.join(unknown)}, which is not supported.")
    if _WINDOW in kinds and (window is None or window < 1):
        raise CheckpointError(f"{fields.origin} has layers with a sliding window, but sliding_window is {window}.")
    return tuple(-1 if kind == _FULL or window is None else window - 1 for kind in kinds)


def _checked(arch: ArchSpec) -> ArchSpec:
    if len(arch.windows) != arch.num_layers:
        raise CheckpointError(f"layer_types names {len(arch.windows)} layers, num_hidden_layers {arch.num_layers}.")
    if arch.num_kv_heads < 1 or arch.num_q_heads % arch.num_kv_heads:
        raise CheckpointError(
            f"num_attention_heads {arch.num_q_heads} is no multiple of num_key_value_heads {arch.num_kv_heads}."
        )
    if arch.head_dim < 2 or arch.head_dim % 2:
        raise CheckpointError(f"head_dim {arch.head_dim} is not an even number above 0, so it cannot be rotated.")
    return arch


_FULL = "full_attention"
_WINDOW = "sliding_attention"
_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}

# What transformers assumes where a config is silent: published configs leave such keys out.
_DEFAULTS: dict[str, Any] = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
_MISTRAL_DEFAULTS: dict[str, Any] = {"num_key_value_heads": 8, "sliding_window": 4096}
_QWEN_DEFAULTS: dict[str, Any] = {"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28}
_GEMMA3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "tie_word_embeddings": True,
}

_FAMILIES: dict[str, tuple[Callable[[ConfigFields], ArchSpec], dict[str, Any]]] = {
    "LlamaForCausalLM": (_llama, {}),
    "MistralForCausalLM": (_mistral, _MISTRAL_DEFAULTS),
    "Qwen2ForCausalLM": (_qwen2, _QWEN_DEFAULTS),
    "Qwen3ForCausalLM": (_qwen3, {**_QWEN_DEFAULTS, "head_dim": 128}),
    "Gemma3ForCausalLM": (_gemma3, _GEMMA3_DEFAULTS),
    "Gemma3ForConditionalGeneration": (_gemma3_with_vision, {"tie_word_embeddings": True}),
}
