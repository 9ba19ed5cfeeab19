"""Models of real shapes and random weights: made on the card where the engine reads them, or written as files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from engine_core.model.arch import ArchSpec, arch_from_config
from engine_core.model.checkpoint import Checkpoint, expected_shapes
from engine_core.model.weights import GenerationDefaults, StoredMatrix
from server.bench.words import WORDS

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "attention_bias": False,
    "eos_token_id": 151645,
}
# Shapes as in the models' own config.json.
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {
        **_QWEN3,
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        **_QWEN3,
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "intermediate_size": 12288,
        "tie_word_embeddings": False,
    },
    # For dry runs, and for comparing a whole model with the reference.
    "tiny": {
        **_QWEN3,
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "intermediate_size": 256,
        "vocab_size": 512,
        "eos_token_id": 511,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
    },
}


class RandomSource:
    """A WeightSource whose tensors are drawn when they are read: the same ones for the same seed and device.

    Args:
        shapes: By name.
        device: Where they are made.
        seed: Of all.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], device: torch.device, seed: int = 0) -> None:
        self.shapes = shapes
        self._device = device
        self._seeds = {name: seed + index for index, name in enumerate(shapes)}

    def read(self, name: str) -> torch.Tensor:
        """Draw a tensor, bf16: norms near 1, matrices so that what flows through them keeps its size."""
        shape = self.shapes[name]
        generator = torch.Generator(device=self._device).manual_seed(self._seeds[name])
        values = torch.randn(shape, generator=generator, device=self._device, dtype=torch.bfloat16)
        return values.mul_(0.1).add_(1.0) if len(shape) == 1 else values.mul_(shape[-1] ** -0.5)

    def read_stored(self, name: str) -> StoredMatrix:
        """Refuse: only kernels for CPUs ask."""
        raise NotImplementedError(f"{name} lies in no file")


def random_checkpoint(name: str, device: torch.device, seed: int = 0) -> Checkpoint:
    """Return a checkpoint of CONFIGS that is on no disk.

    Args:
        name: Of CONFIGS.
        device: Where its weights are made.
        seed: Of the weights.
    """
    arch = arch_from_config(CONFIGS[name])
    return Checkpoint(
        Path(name), arch, RandomSource(expected_shapes(arch), device, seed), GenerationDefaults(frozenset())
    )


@dataclass(frozen=True, slots=True)
class StepFloor:
    """What a decode step must at least take.

    Attributes:
        seconds: The greater of reading and multiplying.
        formula: How it was reckoned.
    """

    seconds: float
    formula: str


def count_weight_bytes(arch: ArchSpec) -> int:
    """Return the bytes that one token is multiplied with: all but the embedding, of which it reads a row; bf16."""
    shapes = expected_shapes(arch)
    numbers = sum(_numel(shape) for name, shape in shapes.items() if "embed_tokens" not in name)
    head = shapes["model.embed_tokens.weight"] if arch.tie_word_embeddings else ()
    return 2 * (numbers + (_numel(head) if head else 0))


def kv_bytes_per_token(arch: ArchSpec) -> int:
    """Return the bytes of K and V that one token leaves behind in all layers, bf16."""
    return arch.num_layers * 2 * arch.num_kv_heads * arch.head_dim * 2


def decode_floor(arch: ArchSpec, *, batch: int, context: float, bandwidth: float, gemm_rate: float) -> StepFloor:
    """Return what one decode step takes on a card that wastes nothing.

    Args:
        arch: Of the model.
        batch: Requests.
        context: Tokens of each, on average.
        bandwidth: Bytes a second.
        gemm_rate: Operations a second.
    """
    weights, kv = count_weight_bytes(arch), kv_bytes_per_token(arch) * batch * context
    read_s, multiply_s = weights / bandwidth, batch * weights / gemm_rate  # 2 operations a weight, of 2 bytes
    return StepFloor(
        max(read_s, multiply_s) + kv / bandwidth,
        f"max({weights / 1e9:.2f} GB of weights / {bandwidth / 1e12:.2f} TB/s = {read_s * 1e3:.2f} ms, "
        f"{batch} rows / {gemm_rate / 1e12:.0f} TFLOP/s = {multiply_s * 1e3:.2f} ms) "
        f"+ {kv / 1e9:.2f} GB of K and V / bandwidth = {kv / bandwidth * 1e3:.2f} ms",
    )


def prefill_floor(arch: ArchSpec, *, tokens: int, gemm_rate: float) -> StepFloor:
    """Return what one prompt takes: its matrices (the head for one row), and attention over the triangle."""
    head = arch.vocab_size * arch.hidden_size
    linears = (count_weight_bytes(arch) // 2 - head) * 2 * tokens
    attention = arch.num_layers * 4 * arch.num_q_heads * arch.head_dim * tokens * (tokens + 1) // 2
    return StepFloor(
        (linears + attention) / gemm_rate,
        f"({linears / 1e12:.1f} TFLOP of matrices + {attention / 1e12:.1f} of attention) "
        f"/ {gemm_rate / 1e12:.0f} TFLOP/s",
    )


# ---------------------------------------------------------------------- on disk, for a server
def write_checkpoint(name: str, folder: Path, device: torch.device) -> None:
    """Write a checkpoint of CONFIGS, weights drawn on ``device``, with a tokenizer to which the load's words are one
    token each."""
    arch = arch_from_config(CONFIGS[name])
    source = RandomSource(expected_shapes(arch), device)
    save_file({each: source.read(each).cpu() for each in source.shapes}, folder / "model.safetensors")
    _write_json(folder / "config.json", CONFIGS[name])
    _write_json(folder / "generation_config.json", {"eos_token_id": CONFIGS[name]["eos_token_id"]})
    build_tokenizer(arch.vocab_size).save(str(folder / "tokenizer.json"))
    _write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": f" w{CONFIGS[name]['eos_token_id']}"},
    )


def build_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a tokenizer of whole words, each with the space before it: those of the load, then made-up ones."""
    words = list(dict.fromkeys(WORDS))[: vocab_size - 1]
    vocab = {"<unk>": 0, **{word: index + 1 for index, word in enumerate(words)}}
    vocab |= {f" w{index}": index for index in range(len(vocab), vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_next")
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def _numel(shape: tuple[int, ...]) -> int:
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
