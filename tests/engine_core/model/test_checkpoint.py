"""Opening a checkpoint: what is complete opens without reading weights, what is not is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_core.errors import CheckpointError
from engine_core.model.checkpoint import expected_shapes, open_checkpoint
from engine_core.model.safetensors_source import INDEX_NAME

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 20,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "eos_token_id": 3,
    "bos_token_id": 1,
}
LAYER_SHAPES = {
    "input_layernorm.weight": (8,),
    "post_attention_layernorm.weight": (8,),
    "self_attn.q_proj.weight": (24, 8),
    "self_attn.k_proj.weight": (12, 8),
    "self_attn.v_proj.weight": (12, 8),
    "self_attn.o_proj.weight": (8, 24),
    "self_attn.q_norm.weight": (6,),
    "self_attn.k_norm.weight": (6,),
    "mlp.gate_proj.weight": (12, 8),
    "mlp.up_proj.weight": (12, 8),
    "mlp.down_proj.weight": (8, 12),
}
SHAPES = {
    "model.embed_tokens.weight": (20, 8),
    "model.norm.weight": (8,),
    "lm_head.weight": (20, 8),
    **{f"model.layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER_SHAPES.items()},
}


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_json(tmp_path / "config.json", CONFIG)
    save_file({name: torch.zeros(shape) for name, shape in SHAPES.items()}, tmp_path / "model.safetensors")
    return tmp_path


def change_tensors(directory: Path, changes: dict[str, torch.Tensor | None]) -> None:
    tensors = {**load_file(directory / "model.safetensors"), **changes}
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, directory / "model.safetensors")


def change_config(directory: Path, **changes: Any) -> None:
    write_json(directory / "config.json", {**CONFIG, **changes})


def test_opens_a_directory(directory: Path) -> None:
    checkpoint = open_checkpoint(directory)
    assert checkpoint.path == directory
    assert checkpoint.arch.architecture == "Qwen3ForCausalLM"
    assert checkpoint.weights.shapes == SHAPES == expected_shapes(checkpoint.arch)
    assert checkpoint.gguf_metadata == {}


def test_biases_and_post_norms_are_expected_where_the_arch_has_them(directory: Path) -> None:
    change_config(directory, architectures=["LlamaForCausalLM"], attention_bias=True, mlp_bias=True)
    with pytest.raises(CheckpointError, match=r"q_proj\.bias.* and 9 more: 14 tensors are missing"):
        open_checkpoint(directory)
    change_config(directory, architectures=["Gemma3ForCausalLM"])
    with pytest.raises(
        CheckpointError, match=r"layers\.0\.pre_feedforward_layernorm\.weight, .*: 4 tensors are missing"
    ):
        open_checkpoint(directory)


def test_more_tensors_than_needed_are_fine(directory: Path) -> None:
    change_tensors(directory, {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(3, dtype=torch.int64)})
    assert open_checkpoint(directory).arch.num_layers == 2


def test_tied_head_is_not_needed(directory: Path) -> None:
    change_tensors(directory, {"lm_head.weight": None})
    with pytest.raises(CheckpointError, match=r"^lm_head\.weight: 1 tensor is missing"):
        open_checkpoint(directory)
    change_config(directory, tie_word_embeddings=True)
    assert open_checkpoint(directory).arch.tie_word_embeddings


def test_missing_tensors_are_named_and_counted(directory: Path) -> None:
    change_tensors(directory, {f"model.layers.1.{name}": None for name in LAYER_SHAPES})
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.\S+, .* and 6 more: 11 tensors are missing"):
        open_checkpoint(directory)


def test_misshapen_tensor_is_named_with_both_shapes(directory: Path) -> None:
    change_tensors(directory, {"model.layers.1.mlp.down_proj.weight": torch.zeros(8, 11)})
    with pytest.raises(CheckpointError, match=r"layers\.1\.mlp\.down_proj\.weight \[8, 11\] instead of \[8, 12\]"):
        open_checkpoint(directory)


def test_unreadable_dtype_is_named(directory: Path) -> None:
    change_tensors(directory, {"model.layers.0.mlp.up_proj.weight": torch.zeros(12, 8, dtype=torch.int8)})
    with pytest.raises(CheckpointError, match=r"layers\.0\.mlp\.up_proj\.weight \(I8\): 1 tensor is not stored as"):
        open_checkpoint(directory)


def test_sharded(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    files = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in tensors if files[name] == file}, directory / file)
    write_json(directory / INDEX_NAME, {"weight_map": files})
    assert open_checkpoint(directory).weights.shapes == SHAPES
    (directory / "model-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-1\.safetensors; the download is not complete"):
        open_checkpoint(directory)


def test_truncated_weights_are_named(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        open_checkpoint(directory)


def test_path_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        open_checkpoint(tmp_path / "nothing")
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"neither a directory .* nor a \.gguf"):
        open_checkpoint(tmp_path / "model.onnx")
    with pytest.raises(CheckpointError, match=r"no config\.json.*form\.$"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"Name a \.gguf file in it, such as .*/model\.gguf\."):
        open_checkpoint(tmp_path)


def test_empty_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        open_checkpoint(tmp_path / "model.gguf")


def test_directory_of_pickles_is_refused(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="pickles"):
        open_checkpoint(directory)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("text", ["", "{", "[1]", "\udcff", pytest.param("[" * 100_000, id="nested too deep")])
def test_broken_json_is_named(directory: Path, name: str, text: str) -> None:
    (directory / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        open_checkpoint(directory)


def test_generation_defaults_fall_back_on_the_config(directory: Path) -> None:
    generation = open_checkpoint(directory).generation
    assert generation.eos_token_ids == {3}
    assert (generation.temperature, generation.top_p, generation.top_k) == (None, None, None)


def test_generation_config_wins(directory: Path) -> None:
    write_json(
        directory / "generation_config.json",
        {"eos_token_id": [5, 7], "temperature": 0.6, "top_p": 0.9, "top_k": 20},
    )
    generation = open_checkpoint(directory).generation
    assert generation.eos_token_ids == {5, 7}
    assert (generation.temperature, generation.top_p, generation.top_k) == (0.6, 0.9, 20)


def test_no_eos_anywhere(directory: Path) -> None:
    change_config(directory, eos_token_id=None)
    assert open_checkpoint(directory).generation.eos_token_ids == frozenset()


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("eos_token_id", "</s>"),
        ("eos_token_id", [1, None]),
        ("eos_token_id", -1),
        ("temperature", "hot"),
        ("top_p", [0.9]),
        ("top_k", 2.5),
    ],
)
def test_ill_typed_generation_config_is_named(directory: Path, key: str, value: Any) -> None:
    write_json(directory / "generation_config.json", {key: value})
    with pytest.raises(CheckpointError, match=f"generation_config.json: {key}"):
        open_checkpoint(directory)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("top_p", 0.0),
        ("top_p", -1.0),
        ("top_p", 5.0),
        ("top_p", float("nan")),
        ("top_k", -2),
    ],
)
def test_generation_defaults_that_no_request_could_ask_for_are_named(directory: Path, key: str, value: float) -> None:
    write_json(directory / "generation_config.json", {key: value})
    with pytest.raises(CheckpointError, match=f"generation_config.json: {key} is .*; it must be"):
        open_checkpoint(directory)


@pytest.mark.parametrize(("key", "value"), [("temperature", 0.0), ("top_p", 1.0), ("top_k", 0), ("top_k", -1)])
def test_generation_defaults_may_turn_a_choice_off(directory: Path, key: str, value: float) -> None:
    write_json(directory / "generation_config.json", {key: value})
    assert getattr(open_checkpoint(directory).generation, key) == value
