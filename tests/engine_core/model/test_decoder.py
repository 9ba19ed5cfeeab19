"""What the oracle's fp32 runs do not reach: bf16, soft caps, the embedding's scale, and growing rope tables."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine_core.model.arch import attn_specs
from engine_core.model.checkpoint import Checkpoint, open_checkpoint
from engine_core.model.decoder import Decoder
from engine_core.model.loader import load_decoder
from kernels.backend import Backend, create_backend
from tests.engine_core.model_checkpoints import VOCAB_SIZE, PagedRequest, PagedRun, oracle_logits, save_checkpoint

PROMPT = random.Random(2).choices(range(3, VOCAB_SIZE - 3), k=40)


def load(checkpoint: Checkpoint, backend: Backend, dtype: torch.dtype = torch.float32) -> Decoder:
    return load_decoder(checkpoint, backend, dtype, lambda share, what: None)


def logits_of(decoder: Decoder, backend: Backend, prompt: list[int] = PROMPT, num_pages: int = 4) -> torch.Tensor:
    run = PagedRun(decoder, page_size=32, num_pages=num_pages)
    return run.step([(PagedRequest(prompt), len(prompt))])[0]


@pytest.mark.parametrize("case", ["qwen3", "gemma3"])
@pytest.mark.parametrize("name", ["torch", "cpu"])
def test_bf16_is_no_worse_than_transformers(tmp_path: Path, case: str, name: str) -> None:
    model = save_checkpoint(tmp_path, case)
    exact = oracle_logits(model, PROMPT)
    theirs = (oracle_logits(model.to(torch.bfloat16), PROMPT).float() - exact).pow(2).mean().sqrt().item()
    backend = create_backend(name)
    found = logits_of(load(open_checkpoint(tmp_path), backend, torch.bfloat16), backend)
    assert found.dtype == torch.float32
    assert (found - exact).pow(2).mean().sqrt().item() < 1.3 * theirs


def test_layer_specs(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "gemma3")
    checkpoint = open_checkpoint(tmp_path)
    decoder = load(checkpoint, create_backend("torch"))
    assert decoder.layer_specs == attn_specs(checkpoint.arch)
    assert [spec.window_left for spec in decoder.layer_specs] == [6, 6, -1, 6]
    assert decoder.dtype == torch.float32


def test_soft_caps(tmp_path: Path) -> None:
    """transformers' Gemma 3 has no cap on scores; one far above them changes nothing, a low one does."""
    save_checkpoint(tmp_path, "gemma3")
    checkpoint, backend = open_checkpoint(tmp_path), create_backend("torch")
    plain = replace(checkpoint, arch=replace(checkpoint.arch, final_soft_cap=0.0))
    uncapped = logits_of(load(plain, backend), backend)
    assert uncapped.abs().max().item() > 6.0
    torch.testing.assert_close(logits_of(load(checkpoint, backend), backend), 6.0 * torch.tanh(uncapped / 6.0))
    high, low = (
        logits_of(load(replace(plain, arch=replace(plain.arch, attn_soft_cap=cap)), backend), backend)
        for cap in (1e4, 0.1)
    )
    torch.testing.assert_close(high, uncapped, rtol=0, atol=1e-3)
    assert (low - uncapped).abs().max().item() > 0.1


def test_embedding_scale_is_rounded_to_the_dtype(tmp_path: Path) -> None:
    """sqrt(48) = 6.928 is 6.9375 in bf16, and Gemma was trained with that."""
    save_checkpoint(tmp_path, "gemma3")
    checkpoint, backend = open_checkpoint(tmp_path), create_backend("torch")
    rounded = replace(checkpoint, arch=replace(checkpoint.arch, embed_scale=6.9375))
    found, expected = (logits_of(load(which, backend, torch.bfloat16), backend) for which in (checkpoint, rounded))
    assert torch.equal(found, expected)
    exact = logits_of(load(checkpoint, backend), backend)
    assert not torch.equal(exact, logits_of(load(rounded, backend), backend))


@pytest.mark.parametrize("name", ["torch", "cpu"])
@pytest.mark.parametrize("max_rows", [1, 7, 16, 39])
def test_logits_are_the_same_however_few_are_made_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, max_rows: int
) -> None:
    """Bit by bit. A prompt of 8,192 tokens would else need 5 GB for its logprobs, over a vocabulary of 152k."""
    save_checkpoint(tmp_path, "gemma3")
    backend = create_backend(name)
    decoder = load(open_checkpoint(tmp_path), backend)
    whole = logits_of(decoder, backend)
    monkeypatch.setattr("engine_core.model.decoder.MAX_LOGITS_BYTES", max_rows * 4 * VOCAB_SIZE + 3)
    assert torch.equal(logits_of(decoder, backend), whole)
    parts = list(decoder.iter_logits(torch.zeros(40, decoder.arch.hidden_size)))
    assert [len(part) for part in parts] == [max_rows] * (40 // max_rows) + [40 % max_rows] * (40 % max_rows > 0)


def test_a_row_of_logits_comes_however_long_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, "gemma3")
    decoder = load(open_checkpoint(tmp_path), create_backend("torch"))
    monkeypatch.setattr("engine_core.model.decoder.MAX_LOGITS_BYTES", 1)
    shapes = [part.shape for part in decoder.iter_logits(torch.zeros(2, decoder.arch.hidden_size))]
    assert shapes == [(1, VOCAB_SIZE)] * 2


def test_rope_tables_grow_with_the_context(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path, "gemma3")
    checkpoint, backend = open_checkpoint(tmp_path), create_backend("torch")
    expected = logits_of(load(checkpoint, backend), backend)
    monkeypatch.setattr("engine_core.model.decoder._FIRST_TABLE_POSITIONS", 8)
    run = PagedRun(load(checkpoint, backend), page_size=32)
    request = PagedRequest(PROMPT)
    found = [run.step([(request, count)])[0] for count in (8, 1, 20, 11)]
    torch.testing.assert_close(torch.cat(found), expected, rtol=0, atol=1e-4)
