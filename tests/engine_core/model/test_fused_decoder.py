"""Every family from its own files through the C++ kernels, against transformers in fp32, however tokens are cut."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from engine_core.model.checkpoint import open_checkpoint
from engine_core.model.decoder import LanguageModel
from engine_core.model.fused_loader import load_fused, model_spec
from engine_core.model.loader import load_decoder
from kernels.backend import create_backend
from kernels.torch_backend import TorchBackend
from tests.engine_core import model_checkpoints
from tests.engine_core.model_checkpoints import (
    CASES,
    VOCAB_SIZE,
    PagedRequest,
    PagedRun,
    oracle_logits,
    save_checkpoint,
)
from tests.gguf_files import llama_metadata, llama_tensors, write_gguf

PROMPT = random.Random(1).choices(range(3, VOCAB_SIZE - 3), k=75)


def load(path: Path, quantization: str = "auto") -> LanguageModel:
    checkpoint = open_checkpoint(path)
    kernels = create_backend("cpu").fuse(model_spec(checkpoint.arch))
    return load_fused(
        checkpoint, kernels, quantization=quantization, kv_dtype="bf16", on_progress=lambda share, what: None
    )


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("case", CASES)
def test_every_family_agrees_with_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.setitem(model_checkpoints.SHAPE, "head_dim", 32)  # the least that the kernels take
    model = save_checkpoint(tmp_path, case)
    run = PagedRun(load(tmp_path), page_size=32)
    expected = oracle_logits(model, PROMPT)
    request = PagedRequest(PROMPT)
    found = torch.cat([run.step([(request, count)])[0] for count in (40, 1, 34)])
    assert relative_error(found, expected) < 0.05


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "Q5_0", "F16", "BF16"])
def test_a_gguf_is_computed_from_its_own_blocks(tmp_path: Path, kind: str) -> None:
    # Heads of 32: q and k of a llama lie in another order, which must be undone on the way.
    metadata = llama_metadata(llama__attention__head_count=2, llama__attention__head_count_kv=1)
    tensors = {name: tensor * (0.2 if "norm" not in name else 1.0) for name, tensor in llama_tensors().items()}
    kinds = {name: GGMLQuantizationType[kind] for name, tensor in tensors.items() if tensor.ndim == 2}
    path = write_gguf(tmp_path / "m.gguf", metadata, tensors, kinds)
    reference = load_decoder(open_checkpoint(path), TorchBackend(), torch.float32, lambda share, what: None)
    prompt = np.random.default_rng(1).integers(0, 32, 40).tolist()
    found, expected = (
        PagedRun(model, page_size=32).step([(PagedRequest(prompt), 40)])[0] for model in (load(path), reference)
    )
    assert relative_error(found, expected) < 0.08


def test_a_longer_context_grows_the_rotary_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine_core.model.decoder._FIRST_TABLE_POSITIONS", 16)
    path = write_gguf(
        tmp_path / "m.gguf",
        llama_metadata(llama__attention__head_count=2, llama__attention__head_count_kv=1),
        llama_tensors(),
    )
    prompt = np.random.default_rng(1).integers(0, 32, 40).tolist()
    grown = PagedRun(load(path), page_size=32).step([(PagedRequest(prompt), 40)])[0]
    monkeypatch.undo()
    assert torch.equal(grown, PagedRun(load(path), page_size=32).step([(PagedRequest(prompt), 40)])[0])


@pytest.mark.parametrize("max_rows", [1, 7])
def test_very_many_logits_come_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, max_rows: int) -> None:
    path = write_gguf(
        tmp_path / "m.gguf",
        llama_metadata(llama__attention__head_count=2, llama__attention__head_count_kv=1),
        llama_tensors(),
    )
    prompt = np.random.default_rng(1).integers(0, 32, 40).tolist()
    model = load(path)
    whole = PagedRun(model, page_size=32).step([(PagedRequest(prompt), 40)])[0]
    monkeypatch.setattr("engine_core.model.fused_decoder.MAX_LOGITS_BYTES", max_rows * 4 * 32 + 3)
    assert torch.equal(whole, PagedRun(model, page_size=32).step([(PagedRequest(prompt), 40)])[0])
