"""The real model against transformers: greedy tokens in fp32, and how near bf16 stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from engine_core.engine import open_checkpoint
from server.tokenizer import Tokenizer, load_tokenizer
from tests.e2e.prompts import PROMPTS
from tests.e2e.transformers_oracle import load_oracle
from tests.helpers import EngineDriver, greedy

NUM_TOKENS = 64
# How far below the oracle's best logit a bf16 choice may lie: bf16 keeps 8 bits of logits of about 20.
BF16_TOLERANCE = 0.6


@pytest.fixture(scope="module")
def oracle(embedded_model: Path) -> LlamaForCausalLM:
    return load_oracle(embedded_model)


@pytest.fixture(scope="module")
def tokenizer(embedded_model: Path) -> Tokenizer:
    return load_tokenizer(embedded_model, open_checkpoint(embedded_model).gguf_metadata)


@torch.inference_mode()
def oracle_logits(oracle: LlamaForCausalLM, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """[len(answer), vocab]: what the oracle thinks at each position of the answer, given what stands before it."""
    logits = oracle(torch.tensor([prompt + answer])).logits[0]
    return logits[len(prompt) - 1 : -1]


@pytest.mark.long  # half a minute each; in make test bf16 stands for them, and test_decoder_oracle.py for fp32
@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_fp32_gives_the_oracles_greedy_tokens(
    backend: str, embedded_model: Path, oracle: LlamaForCausalLM, tokenizer: Tokenizer
) -> None:
    """If each token is the oracle's argmax given those before it, the whole answer is the oracle's greedy answer."""
    prompts = [tokenizer.encode(text, add_special_tokens=True) for text in PROMPTS]
    with EngineDriver(embedded_model, dtype="fp32", backend=backend) as driver:
        answers = driver.generate(prompts, greedy(NUM_TOKENS))
    for text, prompt, answer in zip(PROMPTS, prompts, answers, strict=True):
        assert len(answer) == NUM_TOKENS
        assert answer == oracle_logits(oracle, prompt, answer).argmax(-1).tolist(), text


@pytest.mark.long
def test_bf16_chooses_nearly_the_oracles_best(
    embedded_model: Path, oracle: LlamaForCausalLM, tokenizer: Tokenizer, capsys: pytest.CaptureFixture[str]
) -> None:
    """Report the first divergence of each prompt and its logit gap; no gap may exceed what bf16 explains."""
    prompts = [tokenizer.encode(text, add_special_tokens=True) for text in PROMPTS]
    with EngineDriver(embedded_model, dtype="bf16", backend="cpu") as driver:
        answers = driver.generate(prompts, greedy(NUM_TOKENS))
    lines, worst = [], 0.0
    for text, prompt, answer in zip(PROMPTS, prompts, answers, strict=True):
        logits = oracle_logits(oracle, prompt, answer)
        gaps = logits.max(-1).values - logits.gather(1, torch.tensor(answer)[:, None])[:, 0]
        first = next((index for index, gap in enumerate(gaps.tolist()) if gap > 0), None)
        if first is not None:
            lines.append(f"token {first:2d}, logit gap {gaps[first]:.3f}: {text[:40]!r}")
            worst = max(worst, float(gaps.max()))
    with capsys.disabled():
        print(f"\nbf16 against fp32: {len(lines)} of {len(PROMPTS)} prompts diverge, first at")
        print("\n".join(f"  {line}" for line in lines))
    assert worst < BF16_TOLERANCE
