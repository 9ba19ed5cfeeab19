"""GGUF metadata as the config.json that the same model would have on the Hub. Reads no weights but rope_freqs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from engine_core.errors import CheckpointError
from engine_core.model.config_fields import ConfigFields
from engine_core.model.gguf_names import GGUFFamily
from engine_core.model.rope import RopeSpec, inverse_frequencies

# Every Llama 3.1, 3.2 and 3.3 checkpoint has these; only the factor differs (8 or 32).
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_ROPE_FREQS_TOLERANCE = 1e-4
_GEMMA3_PATTERN = 6
_GEMMA3_27B_LAYERS = 62
_CONTROL_TOKEN = 3
# What ends a turn in the models served here. Files that name no eot_token_id still hold it as a control token.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")


def build_config(
    metadata: Mapping[str, Any],
    family: GGUFFamily,
    shapes: Mapping[str, tuple[int, ...]],
    rope_freqs: np.ndarray[Any, np.dtype[np.float32]] | None,
    origin: str,
) -> dict[str, Any]:
    """Return a config in Hugging Face's words.

    Args:
        metadata: The file's metadata.
        family: What ``general.architecture`` stands for.
        shapes: Every tensor's shape, by Hugging Face name.
        rope_freqs: ``rope_freqs.weight``: a divisor for each rotary frequency, [head_dim // 2]; None if absent.
        origin: The file's name, for messages.

    Raises:
        CheckpointError: A key is missing, ill-typed, or asks for something that is not supported.
    """
    prefix = metadata["general.architecture"] + "."
    fields = ConfigFields({k.removeprefix(prefix): v for k, v in metadata.items() if k.startswith(prefix)}, origin)
    _refuse_experts(fields)
    config = _base_config(fields, family, shapes)
    if family.model_type == "llama":
        config |= _llama_extras(fields, shapes)
    if family.model_type == "gemma3_text":
        config |= _gemma3_extras(fields, config)
    config["rope_scaling"] = _rope_scaling(fields, config, rope_freqs)
    return config


def find_eos_ids(metadata: Mapping[str, Any]) -> frozenset[int]:
    """Return the ids that end an output: the file's eos and eot, and where it names no eot, the turn ends it holds."""
    named = {metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot")}
    ids = {token_id for token_id in named if isinstance(token_id, int)}
    if "tokenizer.ggml.eot_token_id" not in metadata:
        tokens = metadata.get("tokenizer.ggml.tokens", [])
        kinds = metadata.get("tokenizer.ggml.token_type", [])
        pairs = enumerate(zip(tokens, kinds, strict=False))
        ids |= {index for index, (token, kind) in pairs if kind == _CONTROL_TOKEN and token in _TURN_ENDS}
    return frozenset(ids)


def _base_config(fields: ConfigFields, family: GGUFFamily, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    num_heads = fields.count("attention.head_count")
    head_dim = fields.optional_int("attention.key_length") or fields.count("embedding_length") // num_heads
    _check_head_dim(fields, head_dim)
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        # Counted, not read: the key is often absent, and the table may be padded.
        "vocab_size": shapes.get("model.embed_tokens.weight", (0,))[0],
        "hidden_size": fields.count("embedding_length"),
        "intermediate_size": fields.count("feed_forward_length"),
        "num_hidden_layers": fields.num_layers("block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": fields.optional_int("attention.head_count_kv") or num_heads,
        "head_dim": head_dim,
        "max_position_embeddings": fields.count("context_length"),
        "rms_norm_eps": _short(fields.positive("attention.layer_norm_rms_epsilon")),
        "rope_theta": _short(fields.optional_number("rope.freq_base") or 10_000.0),
        "tie_word_embeddings": "lm_head.weight" not in shapes,
    }


def _short(value: float) -> float:
    """Undo the widening of an fp32 value: 9.999999747378752e-06 was written for 1e-05."""
    return float(str(np.float32(value)))


def _check_head_dim(fields: ConfigFields, head_dim: int) -> None:
    for key in ("attention.value_length", "rope.dimension_count"):
        found = fields.optional_int(key) or head_dim
        if found != head_dim:
            raise CheckpointError(f"{fields.origin}: {key} is {found}, the heads are {head_dim} wide; they must agree.")


def _refuse_experts(fields: ConfigFields) -> None:
    experts = fields.optional_int("expert_count")
    if experts:
        raise CheckpointError(f"{fields.origin} is a mixture of {experts} experts, which is not supported.")


def _llama_extras(fields: ConfigFields, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    extras: dict[str, Any] = {
        "attention_bias": "model.layers.0.self_attn.q_proj.bias" in shapes,
        "mlp_bias": "model.layers.0.mlp.up_proj.bias" in shapes,
    }
    window = fields.optional_int("attention.sliding_window")
    if window:
        extras |= {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": window}
    return extras


def _gemma3_extras(fields: ConfigFields, config: Mapping[str, Any]) -> dict[str, Any]:
    # The 27B alone scales queries by the width that its heads would have if they filled the hidden size.
    is_27b = config["num_hidden_layers"] == _GEMMA3_27B_LAYERS
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": fields.count("attention.sliding_window"),
        "layer_types": _gemma3_layer_types(fields, config["num_hidden_layers"]),
        "rope_theta": _short(fields.optional_number("rope.freq_base") or 1_000_000.0),
        "rope_local_base_freq": _short(fields.optional_number("rope.freq_base_swa") or 10_000.0),
        "attn_logit_softcapping": fields.optional_number("attn_logit_softcapping"),
        "final_logit_softcapping": fields.optional_number("final_logit_softcapping"),
    }


def _gemma3_layer_types(fields: ConfigFields, num_layers: int) -> list[str]:
    key = "attention.sliding_window_pattern"
    flags = fields.raw.get(key)
    if isinstance(flags, list):
        return ["sliding_attention" if is_local else "full_attention" for is_local in flags]
    pattern = _GEMMA3_PATTERN if flags is None else fields.count(key)
    return ["full_attention" if (layer + 1) % pattern == 0 else "sliding_attention" for layer in range(num_layers)]


def _rope_scaling(
    fields: ConfigFields,
    config: Mapping[str, Any],
    rope_freqs: np.ndarray[Any, np.dtype[np.float32]] | None,
) -> dict[str, Any] | None:
    if rope_freqs is not None:
        return _llama3_scaling(fields, config, rope_freqs)
    kind = fields.raw.get("rope.scaling.type") or "none"
    linear = fields.optional_number("rope.scale_linear")  # what old files say instead
    factor = fields.optional_number("rope.scaling.factor") or linear or 1.0
    if kind == "linear" or (kind == "none" and linear not in (None, 1.0)):
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        return _yarn_scaling(fields, factor)
    if kind == "none":
        return None
    raise CheckpointError(f"{fields.origin}: rope scaling {kind!r} is not supported; linear and yarn are.")


def _yarn_scaling(fields: ConfigFields, factor: float) -> dict[str, Any]:
    scaling: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
    original = fields.optional_int("rope.scaling.original_context_length")
    if original:
        scaling["original_max_position_embeddings"] = original
    for key in ("beta_fast", "beta_slow"):
        scaling[key] = fields.optional_number(f"rope.scaling.yarn_{key}")
    attn_factor = fields.optional_number("rope.scaling.attn_factor")
    if attn_factor is not None:
        scaling["attention_factor"] = attn_factor * (0.1 * math.log(factor) + 1.0)
    return scaling


def _llama3_scaling(
    fields: ConfigFields, config: Mapping[str, Any], rope_freqs: np.ndarray[Any, np.dtype[np.float32]]
) -> dict[str, Any] | None:
    """Recover Llama 3's scaling from the divisors it was turned into, and prove it by computing them again."""
    factor = round(float(rope_freqs.max()), 4)
    if factor == 1.0 and rope_freqs.min() == 1.0:
        return None
    head_dim, theta = config["head_dim"], config["rope_theta"]
    spec = RopeSpec(
        theta,
        "llama3",
        factor=factor,
        low_freq_factor=_LLAMA3_ROPE["low_freq_factor"],
        high_freq_factor=_LLAMA3_ROPE["high_freq_factor"],
        original_max_position=int(_LLAMA3_ROPE["original_max_position_embeddings"]),
    )
    divisors = inverse_frequencies(RopeSpec(theta), head_dim) / inverse_frequencies(spec, head_dim)
    found = torch.from_numpy(rope_freqs.copy())
    if found.shape != divisors.shape or not torch.allclose(found, divisors, rtol=_ROPE_FREQS_TOLERANCE, atol=0.0):
        raise CheckpointError(
            f"{fields.origin}: its rope_freqs.weight is not Llama 3's scaling; use the model's safetensors instead."
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}
