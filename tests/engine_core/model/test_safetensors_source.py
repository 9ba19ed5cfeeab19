"""Finding a directory's safetensors files, reading them, and refusing what is broken or could run code."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from engine_core.errors import CheckpointError
from engine_core.model.safetensors_source import INDEX_NAME, SafetensorsSource, canonical_name, find_safetensors


def write_tensors(path: Path, **tensors: torch.Tensor) -> Path:
    save_file(tensors, path)
    return path


def write_index(directory: Path, files: Any) -> None:
    weight_map = {f"tensor_{i}": name for i, name in enumerate(files)}
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))


def test_reads_shapes_dtypes_and_values(tmp_path: Path) -> None:
    weight, bias = torch.randn(3, 5), torch.randn(4).bfloat16()
    source = SafetensorsSource([write_tensors(tmp_path / "a.safetensors", weight=weight, bias=bias)])
    assert source.shapes == {"weight": (3, 5), "bias": (4,)}
    assert source.dtypes == {"weight": "F32", "bias": "BF16"}
    assert torch.equal(source.read("weight"), weight)
    assert torch.equal(source.read("bias"), bias)
    with pytest.raises(KeyError):
        source.read("other")


def test_joins_files(tmp_path: Path) -> None:
    one, two = torch.ones(1), torch.ones(2)
    files = [write_tensors(tmp_path / "a.safetensors", one=one), write_tensors(tmp_path / "b.safetensors", two=two)]
    source = SafetensorsSource(files)
    assert torch.equal(source.read("one"), one)
    assert torch.equal(source.read("two"), two)


def test_two_tensors_of_one_name_are_refused(tmp_path: Path) -> None:
    files = [write_tensors(tmp_path / f"{name}.safetensors", weight=torch.ones(1)) for name in "ab"]
    with pytest.raises(CheckpointError, match=r"b\.safetensors holds weight"):
        SafetensorsSource(files)


@pytest.mark.parametrize("damage", ["empty", "short_header", "garbage", "truncated", "longer", "no_file"])
def test_broken_file_is_named(tmp_path: Path, damage: str) -> None:
    path = write_tensors(tmp_path / "model.safetensors", weight=torch.randn(64, 64))
    whole = path.read_bytes()
    damaged = {
        "empty": b"",
        "short_header": whole[:20],
        "garbage": b"\xff" * 64,
        "truncated": whole[:-8],
        "longer": whole + b"12345678",
    }
    path.unlink()
    if damage in damaged:
        path.write_bytes(damaged[damage])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is no readable safetensors file"):
        SafetensorsSource([path])


@pytest.mark.parametrize(
    ("stored", "canonical"),
    [
        ("model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("embed_tokens.weight", "model.embed_tokens.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight",) * 2,
        ("model.vision_tower.encoder.layers.0.mlp.fc1.weight",) * 2,
    ],
)
def test_canonical_name(stored: str, canonical: str) -> None:
    assert canonical_name(stored) == canonical


def test_finds_the_single_file(tmp_path: Path) -> None:
    other = write_tensors(tmp_path / "weights.safetensors", a=torch.ones(1))
    assert find_safetensors(tmp_path) == [other]
    usual = write_tensors(tmp_path / "model.safetensors", a=torch.ones(1))
    assert find_safetensors(tmp_path) == [usual]


def test_the_index_wins(tmp_path: Path) -> None:
    names = ["m-1.safetensors", "m-2.safetensors", "model.safetensors"]
    files = [write_tensors(tmp_path / name, a=torch.ones(1)) for name in names]
    write_index(tmp_path, [names[1], names[0], names[1]])
    assert find_safetensors(tmp_path) == files[:2]


def test_shards_may_be_links_elsewhere(tmp_path: Path) -> None:
    """A hub cache keeps its files that way."""
    blob = write_tensors(tmp_path / "blob", a=torch.ones(1))
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    (snapshot / "m-1.safetensors").symlink_to(blob)
    write_index(snapshot, ["m-1.safetensors"])
    assert find_safetensors(snapshot) == [snapshot / "m-1.safetensors"]


def test_missing_shards_are_counted_and_named(tmp_path: Path) -> None:
    write_tensors(tmp_path / "m-1.safetensors", a=torch.ones(1))
    write_index(tmp_path, [f"m-{i}.safetensors" for i in range(1, 9)])
    with pytest.raises(CheckpointError, match=r"7 of the 8 files .* m-2\.safetensors, .* m-6\.safetensors; the"):
        find_safetensors(tmp_path)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/passwd", "a/../../b", "..\\b", "C:\\b"])
def test_index_must_not_leave_the_directory(tmp_path: Path, name: str) -> None:
    write_index(tmp_path, [name])
    with pytest.raises(CheckpointError, match="outside"):
        find_safetensors(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}', '{"weight_map": {}}']
)
def test_broken_index_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / INDEX_NAME).write_text(text)
    with pytest.raises(CheckpointError, match=INDEX_NAME):
        find_safetensors(tmp_path)


def test_several_files_need_an_index(tmp_path: Path) -> None:
    for name in ("m-1", "m-2"):
        write_tensors(tmp_path / f"{name}.safetensors", a=torch.ones(1))
    with pytest.raises(CheckpointError, match=f"no {INDEX_NAME}"):
        find_safetensors(tmp_path)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_with_the_reason(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"pickles .* run code .* convert .* safetensors"):
        find_safetensors(tmp_path)


def test_no_weights_at_all(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \.safetensors"):
        find_safetensors(tmp_path)
