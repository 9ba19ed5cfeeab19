"""Loading: what reaches the backend, in which dtype and form, whatever the files look like."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine_core.errors import CheckpointError
from engine_core.model.checkpoint import Checkpoint, open_checkpoint
from engine_core.model.decoder import Decoder
from engine_core.model.loader import load_decoder
from engine_core.model.weights import StoredMatrix
from kernels.torch_backend import DenseLinear, TorchBackend
from tests.engine_core.model_checkpoints import PagedRequest, PagedRun, oracle_logits, save_checkpoint

PROMPT = [5, 9, 60, 33, 7, 7, 81, 12]


class RecordingBackend(TorchBackend):
    """Keeps what it was given to pack."""

    def __init__(self) -> None:
        super().__init__()
        self.packed: list[DenseLinear] = []

    def pack_linear(self, weight: torch.Tensor, bias: torch.Tensor | None) -> DenseLinear:
        self.packed.append(super().pack_linear(weight, bias))
        return self.packed[-1]


class UnreadableSource:
    """Has every shape and no bytes."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes = shapes

    def read(self, name: str) -> torch.Tensor:
        raise CheckpointError(f"The tensor {name} cannot be read.")

    def read_stored(self, name: str) -> StoredMatrix:
        raise CheckpointError(f"The tensor {name} cannot be read.")


def load(checkpoint: Checkpoint, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(checkpoint, TorchBackend(), dtype, lambda share, what: None)


def logits_of(decoder: Decoder) -> torch.Tensor:
    run = PagedRun(decoder, page_size=4)
    return run.step([(PagedRequest(PROMPT), len(PROMPT))])[0]


def test_linears_are_fused_in_order_and_converted(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama_scaled_biased")
    stored = load_file(tmp_path / "model.safetensors")
    backend = RecordingBackend()
    load_decoder(open_checkpoint(tmp_path), backend, torch.bfloat16, lambda share, what: None)
    qkv, o, gate_up, down = backend.packed[:4]
    assert len(backend.packed) == 4 * 3 + 1
    names = [f"model.layers.0.self_attn.{name}_proj" for name in "qkv"]
    assert torch.equal(qkv.weight, torch.cat([stored[f"{name}.weight"].bfloat16() for name in names]))
    assert qkv.bias is not None
    assert torch.equal(qkv.bias, torch.cat([stored[f"{name}.bias"].bfloat16() for name in names]))
    assert torch.equal(o.weight, stored["model.layers.0.self_attn.o_proj.weight"].bfloat16())
    names = [f"model.layers.0.mlp.{name}_proj" for name in ("gate", "up")]
    assert torch.equal(gate_up.weight, torch.cat([stored[f"{name}.weight"].bfloat16() for name in names]))
    assert torch.equal(down.weight, stored["model.layers.0.mlp.down_proj.weight"].bfloat16())
    assert down.bias is not None


def test_progress_rises_to_one(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    reports: list[tuple[float, str]] = []
    load_decoder(open_checkpoint(tmp_path), TorchBackend(), torch.float32, lambda *report: reports.append(report))
    shares = [share for share, _ in reports]
    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0.0, 1.0)
    assert "layer 3 of 3" in [what for _, what in reports]


def test_weights_bytes(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, "llama")
    norms = sum(parameter.numel() for name, parameter in model.named_parameters() if "norm" in name)
    expected = 2 * (sum(parameter.numel() for parameter in model.parameters()) - norms)
    assert load(open_checkpoint(tmp_path), torch.bfloat16).weights_bytes == expected


def test_sharded_checkpoint_gives_the_same_logits(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, "qwen3", max_shard_size="40KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    error = (logits_of(load(open_checkpoint(tmp_path))) - oracle_logits(model, PROMPT)).abs().max()
    assert error.item() < 1e-4


def test_tied_head_wins_over_a_stored_one(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, "llama_yarn_tied")
    path = tmp_path / "model.safetensors"
    embedding = model.get_input_embeddings().weight
    save_file({**load_file(path), "lm_head.weight": torch.zeros_like(embedding)}, path, metadata={"format": "pt"})
    error = (logits_of(load(open_checkpoint(tmp_path))) - oracle_logits(model, PROMPT)).abs().max()
    assert error.item() < 1e-4


def test_decoder_does_not_depend_on_the_files_once_loaded(tmp_path: Path) -> None:
    """In fp32 nothing needs converting, so a view of the mapped file would do, and would break."""
    model = save_checkpoint(tmp_path, "llama")
    checkpoint = open_checkpoint(tmp_path)
    decoder = load(checkpoint)
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.write(bytes((tmp_path / "model.safetensors").stat().st_size))
    assert not checkpoint.weights.read("model.norm.weight").any()  # the source itself sees the change
    assert (logits_of(decoder) - oracle_logits(model, PROMPT)).abs().max().item() < 1e-4


def test_bare_decoder_names(tmp_path: Path) -> None:
    """A checkpoint saved from the model without its head has no ``model.`` prefix."""
    model = save_checkpoint(tmp_path, "llama_yarn_tied")
    path = tmp_path / "model.safetensors"
    save_file({name.removeprefix("model."): tensor for name, tensor in load_file(path).items()}, path)
    assert (logits_of(load(open_checkpoint(tmp_path))) - oracle_logits(model, PROMPT)).abs().max().item() < 1e-4


def test_old_dialect_of_rope_gives_the_same_logits(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path, "llama_scaled_biased")
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    scaling = config.pop("rope_parameters")
    path.write_text(json.dumps({**config, "rope_theta": scaling.pop("rope_theta"), "rope_scaling": scaling}))
    assert (logits_of(load(open_checkpoint(tmp_path))) - oracle_logits(model, PROMPT)).abs().max().item() < 1e-4


def test_unreadable_tensor_is_named(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "llama")
    checkpoint = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.input_layernorm\.weight"):
        load(replace(checkpoint, weights=UnreadableSource(checkpoint.weights.shapes)))
