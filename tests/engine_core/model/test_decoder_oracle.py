"""Every family's logits against transformers', in fp32, whichever way the tokens are cut into steps."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine_core.model.checkpoint import open_checkpoint
from engine_core.model.loader import load_decoder
from kernels.backend import Backend, create_backend
from tests.engine_core.model_checkpoints import (
    CASES,
    VOCAB_SIZE,
    PagedRequest,
    PagedRun,
    oracle_logits,
    save_checkpoint,
)

MAX_ERROR = 1e-4
# 75 tokens: over two of the CPU backend's pages, past every window, past the trained range of the scaled ropes.
PROMPT = random.Random(1).choices(range(3, VOCAB_SIZE - 3), k=75)
PAGE_SIZES = {"torch": 8, "cpu": 32}


@pytest.fixture(scope="module", params=list(CASES))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PreTrainedModel]:
    directory = tmp_path_factory.mktemp(request.param)
    return directory, save_checkpoint(directory, request.param)


@pytest.fixture(scope="module")
def oracle(saved: tuple[Path, PreTrainedModel]) -> PreTrainedModel:
    return saved[1]


@pytest.fixture(scope="module")
def expected(oracle: PreTrainedModel) -> torch.Tensor:
    return oracle_logits(oracle, PROMPT)


@pytest.fixture(scope="module", params=["torch", "cpu"])
def backend(request: pytest.FixtureRequest) -> Backend:
    return create_backend(request.param)


@pytest.fixture
def run(saved: tuple[Path, PreTrainedModel], backend: Backend) -> PagedRun:
    decoder = load_decoder(open_checkpoint(saved[0]), backend, torch.float32, lambda share, what: None)
    return PagedRun(decoder, page_size=PAGE_SIZES[backend.name])


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert (found - expected).abs().max().item() < MAX_ERROR


def test_oracle_itself_is_not_trivial(expected: torch.Tensor) -> None:
    """Logits that hardly differ would let mistakes pass the absolute bound."""
    assert expected.std().item() > 0.5
    assert len(set(expected.argmax(dim=1).tolist())) > len(PROMPT) // 4


def test_whole_prompt(run: PagedRun, expected: torch.Tensor) -> None:
    assert_close(run.step([(PagedRequest(PROMPT), len(PROMPT))])[0], expected)


@pytest.mark.parametrize("chunk", [3, 7, 32])
def test_chunked_prompt(run: PagedRun, expected: torch.Tensor, chunk: int) -> None:
    request = PagedRequest(PROMPT)
    parts = [run.step([(request, min(chunk, len(PROMPT) - start))])[0] for start in range(0, len(PROMPT), chunk)]
    assert_close(torch.cat(parts), expected)


def test_token_by_token(run: PagedRun, expected: torch.Tensor) -> None:
    request = PagedRequest(PROMPT)
    assert_close(torch.cat([run.step([(request, 1)])[0] for _ in PROMPT]), expected)


def test_after_a_prefix_hit(run: PagedRun, oracle: PreTrainedModel) -> None:
    first = PagedRequest(PROMPT)
    run.step([(first, len(PROMPT))])
    second = run.share_prefix(first, [*PROMPT[:40], *reversed(PROMPT[40:])])
    start = second.num_computed
    assert start == 40 // run.page_size * run.page_size
    found = run.step([(second, len(PROMPT) - start)])[0]
    assert_close(found, oracle_logits(oracle, second.token_ids)[start:])


def test_mixed_batch(run: PagedRun, oracle: PreTrainedModel, expected: torch.Tensor) -> None:
    """One request decodes while another's prompt comes in chunks; their pages interleave."""
    decoding, arriving = PagedRequest(PROMPT), PagedRequest(PROMPT[::-1])
    found = {decoding: [run.step([(decoding, 70)])[0]], arriving: []}
    for chunk in (1, 20, 2, 31, 21):
        for request, logits in zip((decoding, arriving), run.step([(decoding, 1), (arriving, chunk)]), strict=True):
            found[request].append(logits)
    assert_close(torch.cat(found[decoding]), expected)
    assert_close(torch.cat(found[arriving]), oracle_logits(oracle, arriving.token_ids))


def test_only_the_rows_asked_for(run: PagedRun, expected: torch.Tensor) -> None:
    request = PagedRequest(PROMPT)
    (none,) = run.step([(request, 30)], logit_rows=[])
    assert none.shape == (0, VOCAB_SIZE)
    assert none.dtype == torch.float32
    (some,) = run.step([(request, 45)], logit_rows=[44, 3])
    assert_close(some, expected[[74, 33]])
