"""The checkpoints that peers are compared on, written once into the cache: SmolLM2 in bf16, two with random weights.

    python tests/bench/peer_checkpoints.py [--cache DIR]

Every peer reads the same values: SmolLM2's are those of the embedded Q4_1 file, dequantised. All have its tokenizer.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, Python looks beside the script only

import torch
from safetensors.torch import save_file

from engine_core.model.gguf_source import GGUFFile, open_gguf
from server.config import default_cache_dir
from server.gguf_tokenizer import RebuiltTokenizer, rebuild_tokenizer
from server.model_resolver import resolve_model

_COMPLETE = "complete"  # a marker: without it the directory was being written when something went wrong
_DEVIATION = 0.02
_Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """A model that has the shape of a real one, and random weights.

    Attributes:
        architecture: Hugging Face's class.
        model_type: As in config.json.
        num_layers: And so on: see config.json.
    """

    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    rope_theta: float
    rms_norm_eps: float
    has_qk_norms: bool

    def to_config(self) -> dict[str, Any]:
        """Return it as config.json has it."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "num_hidden_layers": self.num_layers,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_attention_heads": self.num_q_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_model_len,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "hidden_act": "silu",
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
        }

    def kv_bytes_per_token(self) -> int:
        """Return what one token takes of a bf16 KV cache."""
        return self.num_layers * self.num_kv_heads * self.head_dim * 2 * 2


QWEN3 = Shape("Qwen3ForCausalLM", "qwen3", 28, 1024, 3072, 16, 8, 128, 151_936, 40_960, 1e6, 1e-6, True)
TINY = Shape("LlamaForCausalLM", "llama", 1, 64, 128, 2, 2, 32, 49_152, 8_192, 1e4, 1e-5, False)


def find_checkpoint(name: str, cache: Path, progress: Callable[[str], None]) -> Path:
    """Return a checkpoint's directory, written first where it is not there.

    Args:
        name: A key of WRITERS.
        cache: Where they are kept.
        progress: Told what takes a while.
    """
    folder = cache / name
    if (folder / _COMPLETE).exists():
        return folder
    progress(f"writing the checkpoint {name} into {folder}")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    WRITERS[name](folder)
    (folder / _COMPLETE).touch()
    return folder


def find_embedded_gguf() -> Path:
    """Return the embedded model's file, fetched where it is not there."""
    return resolve_model(None, progress=print, cache_dir=default_cache_dir()).path


def get_weight_bytes(folder: Path) -> int:
    """Return the size of a checkpoint's weights."""
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _write_smollm2(folder: Path) -> None:
    file = open_gguf(find_embedded_gguf())
    weights = {name: file.weights.read(name).to(torch.bfloat16).contiguous() for name in file.weights.shapes}
    _write_model(folder, file.config, weights)
    _write_tokenizer(folder, file)


def _write_random(shape: Shape) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        generator = torch.Generator().manual_seed(0)
        weights = {
            name: (
                torch.ones(size, dtype=torch.bfloat16)
                if name.endswith("norm.weight")
                else (torch.randn(size, generator=generator) * _DEVIATION).to(torch.bfloat16)
            )
            for name, size in _sizes(shape)
        }
        _write_model(folder, shape.to_config(), weights)
        _write_tokenizer(folder, open_gguf(find_embedded_gguf()))

    return write


def _sizes(shape: Shape) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner, head = shape.hidden_size, shape.intermediate_size, shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab_size, hidden)
    yield "model.norm.weight", (hidden,)
    for layer in range(shape.num_layers):
        prefix = f"model.layers.{layer}."
        yield prefix + "input_layernorm.weight", (hidden,)
        yield prefix + "post_attention_layernorm.weight", (hidden,)
        for name, num_heads in (("q", shape.num_q_heads), ("k", shape.num_kv_heads), ("v", shape.num_kv_heads)):
            yield f"{prefix}self_attn.{name}_proj.weight", (num_heads * head, hidden)
        yield prefix + "self_attn.o_proj.weight", (hidden, shape.num_q_heads * head)
        if shape.has_qk_norms:
            yield prefix + "self_attn.q_norm.weight", (head,)
            yield prefix + "self_attn.k_norm.weight", (head,)
        yield prefix + "mlp.gate_proj.weight", (inner, hidden)
        yield prefix + "mlp.up_proj.weight", (inner, hidden)
        yield prefix + "mlp.down_proj.weight", (hidden, inner)


def _write_model(folder: Path, config: dict[str, Any], weights: _Tensors) -> None:
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2}
    _write_json(folder / "config.json", {**config, **ids, "torch_dtype": "bfloat16", "use_cache": True})
    _write_json(folder / "generation_config.json", ids)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _write_tokenizer(folder: Path, file: GGUFFile) -> None:
    tokenizer: RebuiltTokenizer = rebuild_tokenizer(file.metadata)
    tokenizer.pipeline.save(str(folder / "tokenizer.json"))
    named = {"bos_token": tokenizer.bos_token, "eos_token": tokenizer.eos_token, "pad_token": tokenizer.eos_token}
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **named,
        "add_bos_token": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 8_192,
        "chat_template": file.metadata["tokenizer.chat_template"],
    }
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "special_tokens_map.json", named)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


WRITERS: dict[str, Callable[[Path], None]] = {
    "smollm2": _write_smollm2,
    "qwen3": _write_random(QWEN3),
    "tiny": _write_random(TINY),
}


def bench_cache_dir() -> Path:
    """Return where the benches keep what they make, unless they are told otherwise."""
    return Path(os.environ.get("POINTSMAN_BENCH_CACHE") or default_cache_dir() / "bench")


def main() -> None:
    """Write all of them."""
    parser = argparse.ArgumentParser(description="Write the checkpoints that peers are compared on.")
    parser.add_argument("--cache", type=Path, default=bench_cache_dir(), metavar="DIR")
    args = parser.parse_args()
    for name in WRITERS:
        print(find_checkpoint(name, args.cache, print))


if __name__ == "__main__":
    main()
