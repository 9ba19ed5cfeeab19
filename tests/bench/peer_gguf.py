"""A llama checkpoint as a bf16 GGUF file for llama.cpp, with the embedded file's tokenizer.

Rows of q and k stay as they are: of random weights, which this is for, llama.cpp's order is as good as another.
"""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_WHOLE_MODEL = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}


def write_random_gguf(source: Path, tokenizer: Path, target: Path) -> None:
    """Write a GGUF file.

    Args:
        source: A directory of peer_checkpoints, of a llama with random weights.
        tokenizer: A GGUF file whose tokenizer is taken.
        target: Is written whole, or not at all.
    """
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "llama")
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_dimension_count(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    _copy_tokenizer(tokenizer, writer)
    for name, tensor in load_file(source / "model.safetensors").items():
        _add_tensor(writer, name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)


def _copy_tokenizer(source: Path, writer: gguf.GGUFWriter) -> None:
    for name, field in gguf.GGUFReader(source).fields.items():
        if name.startswith("tokenizer."):
            sub_type = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], sub_type)


def _add_tensor(writer: gguf.GGUFWriter, name: str, tensor: torch.Tensor) -> None:
    if tensor.dim() == 1:  # llama.cpp wants norms in fp32
        writer.add_tensor(_translate(name), tensor.float().numpy())
        return
    raw = tensor.contiguous().view(torch.int16).numpy().view(np.uint8)
    writer.add_tensor(_translate(name), raw, raw_dtype=gguf.GGMLQuantizationType.BF16)


def _translate(name: str) -> str:
    if name in _WHOLE_MODEL:
        return _WHOLE_MODEL[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"
