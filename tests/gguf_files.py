"""Small GGUF files for tests, written with gguf's own writer: an independent reading of the format."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType
from gguf.quants import quantize

Tensor = np.ndarray[Any, np.dtype[np.float32]]


def llama_metadata(**overrides: Any) -> dict[str, Any]:
    """Return the metadata of a 2-layer llama: hidden 64, 4 heads of 16, 2 kv heads. Values of None are left out."""
    values: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.rope.freq_base": 10000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
    }
    values |= {name.replace("__", "."): value for name, value in overrides.items()}
    return {name: value for name, value in values.items() if value is not None}


def llama_tensors(seed: int = 0, num_layers: int = 2) -> dict[str, Tensor]:
    """Return random tensors that fit llama_metadata(), in GGUF names; the head is tied to the embedding."""
    shapes = {"token_embd": (32, 64), "output_norm": (64,)}
    for layer in range(num_layers):
        shapes |= {
            f"blk.{layer}.attn_norm": (64,),
            f"blk.{layer}.ffn_norm": (64,),
            f"blk.{layer}.attn_q": (64, 64),
            f"blk.{layer}.attn_k": (32, 64),
            f"blk.{layer}.attn_v": (32, 64),
            f"blk.{layer}.attn_output": (64, 64),
            f"blk.{layer}.ffn_gate": (96, 64),
            f"blk.{layer}.ffn_up": (96, 64),
            f"blk.{layer}.ffn_down": (64, 96),
        }
    random = np.random.default_rng(seed)
    return {f"{name}.weight": random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    kinds: Mapping[str, GGMLQuantizationType] | None = None,
) -> Path:
    """Write a file and return its path.

    Args:
        path: Where to.
        metadata: Python values; int becomes uint32, float fp32.
        tensors: fp32, outermost dimension first.
        kinds: How a tensor is stored, where not F32.
    """
    writer = gguf.GGUFWriter(str(path), metadata.get("general.architecture", "llama"))
    for key, value in metadata.items():
        if key != "general.architecture":
            _add(writer, key, value)
    for name, tensor in tensors.items():
        kind = (kinds or {}).get(name, GGMLQuantizationType.F32)
        writer.add_tensor(name, quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
