"""peers.py as `make bench` runs it, on the tiny checkpoint: two short requests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine_core.model.gguf_source import open_gguf
from tests.bench.peer_checkpoints import find_checkpoint, find_embedded_gguf, get_weight_bytes
from tests.bench.peer_gguf import write_random_gguf

ROOT = Path(__file__).parents[2]


@pytest.mark.model
def test_pointsmans_row_of_a_load_is_printed_and_written(tmp_path: Path) -> None:
    command = [sys.executable, "tests/bench/peers.py", "--smoke", "--repeat", "1", "--only", "W6"]
    command += ["--peer", "pointsman,vllm", "--home", "vllm=/nowhere", "--cache", str(tmp_path)]
    command += ["--json", str(tmp_path / "out.json")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert "vllm is left out: not installed" in result.stderr
    assert "1/1 done" in result.stderr
    (row,) = (line for line in result.stdout.splitlines() if line.startswith("| W6"))
    assert float(row.split("|")[2].replace(",", "").rstrip("* ")) > 0.0
    (run,) = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert (run["figures"]["num_output_tokens"], run["figures"]["num_prompt_tokens"]) == (16, 64)


@pytest.mark.model
def test_a_checkpoint_is_written_once_and_its_gguf_holds_the_same(tmp_path: Path) -> None:
    told: list[str] = []
    folder = find_checkpoint("tiny", tmp_path, told.append)
    assert find_checkpoint("tiny", tmp_path, told.append) == folder
    assert len(told) == 1
    tensors = load_file(folder / "model.safetensors")
    assert get_weight_bytes(folder) > sum(tensor.nbytes for tensor in tensors.values())
    write_random_gguf(folder, find_embedded_gguf(), tmp_path / "tiny.gguf")
    file = open_gguf(tmp_path / "tiny.gguf")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == dict(file.weights.shapes)
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.down_proj.weight", "model.norm.weight"):
        assert torch.equal(file.weights.read(name).to(torch.bfloat16), tensors[name]), name
    assert file.config["num_key_value_heads"] == json.loads((folder / "config.json").read_text())["num_key_value_heads"]
    assert file.metadata["tokenizer.ggml.tokens"] == open_gguf(find_embedded_gguf()).metadata["tokenizer.ggml.tokens"]
