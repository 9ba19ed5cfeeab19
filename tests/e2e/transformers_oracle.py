"""SmolLM2 in transformers, read from its GGUF by hand: an oracle that shares no loading code with the product."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from gguf.quants import dequantize
from transformers import LlamaConfig, LlamaForCausalLM

_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def load_oracle(path: Path) -> LlamaForCausalLM:
    """Return the fp32 model of a Llama GGUF, in evaluation mode."""
    reader = gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if name.startswith("llama.")}
    heads = {"attn_q": fields["llama.attention.head_count"], "attn_k": fields["llama.attention.head_count_kv"]}
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=fields["llama.vocab_size"],
            hidden_size=fields["llama.embedding_length"],
            intermediate_size=fields["llama.feed_forward_length"],
            num_hidden_layers=fields["llama.block_count"],
            num_attention_heads=heads["attn_q"],
            num_key_value_heads=heads["attn_k"],
            max_position_embeddings=fields["llama.context_length"],
            rms_norm_eps=fields["llama.attention.layer_norm_rms_epsilon"],
            rope_parameters={"rope_type": "default", "rope_theta": fields["llama.rope.freq_base"]},
            tie_word_embeddings=True,
            attn_implementation="eager",
        )
    )
    state = {}
    for tensor in reader.tensors:
        weight = np.array(dequantize(tensor.data, tensor.tensor_type), np.float32)
        state[_name(tensor.name)] = torch.from_numpy(_halves(weight, heads.get(tensor.name.split(".")[-2], 0)))
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], []), (missing, unexpected)
    model.tie_weights()
    return model.eval()


def _name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, part, _ = name.split(".")
    return f"model.layers.{layer}.{_NAMES[part]}.weight"


def _halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo GGUF's interleaving of rope pairs on the rows of q and k."""
    if not num_heads:
        return weight
    pairs = weight.reshape(num_heads, -1, 2, weight.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2).reshape(weight.shape))
