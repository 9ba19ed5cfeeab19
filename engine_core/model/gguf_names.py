"""Which GGUF architectures are read, and what each calls a tensor that Hugging Face's checkpoints call otherwise."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_LAYER = re.compile(r"blk\.(\d+)\.([a-z_]+)\.(weight|bias)")

_WHOLE_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LINEARS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_PRE_NORM = {"ffn_norm": "post_attention_layernorm"}
_SANDWICH_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}


@dataclass(frozen=True, slots=True)
class GGUFFamily:
    """How one ``general.architecture`` differs from its Hugging Face checkpoint.

    Attributes:
        architecture: The Hugging Face class, such as ``LlamaForCausalLM``.
        model_type: Hugging Face's ``model_type``.
        layer_names: A layer's tensors, GGUF name to Hugging Face name.
        has_permuted_qk: Rows of q and k are reordered so that rotated pairs are neighbours.
        has_folded_norms: Norms hold ``1 + w`` where the checkpoint holds ``w``.
    """

    architecture: str
    model_type: str
    layer_names: Mapping[str, str]
    has_permuted_qk: bool = False
    has_folded_norms: bool = False


FAMILIES: Mapping[str, GGUFFamily] = {
    "llama": GGUFFamily("LlamaForCausalLM", "llama", {**_LINEARS, **_PRE_NORM}, has_permuted_qk=True),
    "qwen2": GGUFFamily("Qwen2ForCausalLM", "qwen2", {**_LINEARS, **_PRE_NORM}),
    "qwen3": GGUFFamily("Qwen3ForCausalLM", "qwen3", {**_LINEARS, **_PRE_NORM, **_QK_NORMS}),
    "gemma3": GGUFFamily(
        "Gemma3ForCausalLM", "gemma3_text", {**_LINEARS, **_SANDWICH_NORMS, **_QK_NORMS}, has_folded_norms=True
    ),
}


def hf_name(family: GGUFFamily, gguf_name: str) -> str | None:
    """Translate one tensor's name, or return None where the family has no such tensor."""
    if gguf_name in _WHOLE_MODEL:
        return _WHOLE_MODEL[gguf_name]
    match = _LAYER.fullmatch(gguf_name)
    if match is None or match[2] not in family.layer_names:
        return None
    return f"model.layers.{match[1]}.{family.layer_names[match[2]]}.{match[3]}"
