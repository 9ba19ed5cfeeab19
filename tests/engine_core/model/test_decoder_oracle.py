"""Every family's logits against transformers', whichever way the tokens are cut into steps: in fp32, and in bf16 on a
card's stand-ins.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

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
from tests.kernels import flashinfer_machine

MAX_ERROR = 1e-4
# 75 tokens: over two of the CPU backend's pages, past every window, past the trained range of the scaled ropes.
PROMPT = random.Random(1).choices(range(3, VOCAB_SIZE - 3), k=75)


class Setting(NamedTuple):
    """How a backend is tried: on heads of this many numbers (None = the case's own), in this dtype, on such pages."""

    create_backend: Callable[[], Backend]
    page_size: int
    dtype: torch.dtype = torch.float32
    head_dim: int | None = None


SETTINGS = {
    "torch": Setting(lambda: create_backend("torch"), 8),
    "cpu": Setting(lambda: create_backend("cpu"), 32),
    "flashinfer": Setting(flashinfer_machine.create_backend, 16, torch.bfloat16, 64),
}


@dataclass
class Oracle:
    """transformers' model. It also tells how near it is to itself in the dtype that is tried.

    Args:
        model: fp32, of the weights that were saved.
        dtype: What is tried.
    """

    model: PreTrainedModel
    dtype: torch.dtype
    _exact: dict[tuple[int, ...], torch.Tensor] = field(default_factory=dict)
    _errors: dict[tuple[int, ...], float] = field(default_factory=dict)

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        key = tuple(token_ids)
        if key not in self._exact:
            self._exact[key] = oracle_logits(self.model, token_ids)
        return self._exact[key]

    def check(self, found: torch.Tensor, token_ids: Sequence[int], rows: slice | list[int] = slice(None)) -> None:
        """Compare logits of a text, or of some of its rows, with the oracle's."""
        expected = self.logits(token_ids)[rows]
        assert found.dtype == torch.float32
        assert found.shape == expected.shape
        error = found - expected
        if self.dtype == torch.float32:
            assert error.abs().max().item() < MAX_ERROR
        else:
            assert _rms(error) < 1.3 * self._own_error(token_ids), "bf16 is no worse than transformers'"

    def _own_error(self, token_ids: Sequence[int]) -> float:
        key = tuple(token_ids)
        if key not in self._errors:
            rounded = oracle_logits(copy.deepcopy(self.model).to(self.dtype), token_ids)
            self._errors[key] = _rms(rounded.float() - self.logits(token_ids))
        return self._errors[key]


def _rms(error: torch.Tensor) -> float:
    return error.pow(2).mean().sqrt().item()


@pytest.fixture(scope="module", params=list(CASES))
def case(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module", params=list(SETTINGS))
def setting(request: pytest.FixtureRequest) -> Setting:
    return SETTINGS[request.param]


@pytest.fixture(scope="module")
def backend(setting: Setting) -> Backend:
    return setting.create_backend()


@pytest.fixture(scope="module")
def saved(case: str, setting: Setting, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Oracle]:
    directory = tmp_path_factory.mktemp(case)
    return directory, Oracle(save_checkpoint(directory, case, head_dim=setting.head_dim), setting.dtype)


@pytest.fixture(scope="module")
def oracle(saved: tuple[Path, Oracle]) -> Oracle:
    return saved[1]


@pytest.fixture
def run(saved: tuple[Path, Oracle], setting: Setting, backend: Backend) -> PagedRun:
    decoder = load_decoder(open_checkpoint(saved[0]), backend, setting.dtype, lambda share, what: None)
    return PagedRun(decoder, page_size=setting.page_size)


def test_oracle_itself_is_not_trivial(oracle: Oracle) -> None:
    """Logits that hardly differ would let mistakes pass the absolute bound."""
    expected = oracle.logits(PROMPT)
    assert expected.std().item() > 0.5
    assert len(set(expected.argmax(dim=1).tolist())) > len(PROMPT) // 4


def test_whole_prompt(run: PagedRun, oracle: Oracle) -> None:
    oracle.check(run.step([(PagedRequest(PROMPT), len(PROMPT))])[0], PROMPT)


@pytest.mark.parametrize("chunk", [3, 7, 32])
def test_chunked_prompt(run: PagedRun, oracle: Oracle, chunk: int) -> None:
    request = PagedRequest(PROMPT)
    parts = [run.step([(request, min(chunk, len(PROMPT) - start))])[0] for start in range(0, len(PROMPT), chunk)]
    oracle.check(torch.cat(parts), PROMPT)


def test_token_by_token(run: PagedRun, oracle: Oracle) -> None:
    request = PagedRequest(PROMPT)
    oracle.check(torch.cat([run.step([(request, 1)])[0] for _ in PROMPT]), PROMPT)


def test_after_a_prefix_hit(run: PagedRun, oracle: Oracle) -> None:
    first = PagedRequest(PROMPT)
    run.step([(first, len(PROMPT))])
    second = run.share_prefix(first, [*PROMPT[:40], *reversed(PROMPT[40:])])
    start = second.num_computed
    assert start == 40 // run.page_size * run.page_size
    found = run.step([(second, len(PROMPT) - start)])[0]
    oracle.check(found, second.token_ids, slice(start, None))


def test_mixed_batch(run: PagedRun, oracle: Oracle) -> None:
    """One request decodes while another's prompt comes in chunks; their pages interleave."""
    decoding, arriving = PagedRequest(PROMPT), PagedRequest(PROMPT[::-1])
    found = {decoding: [run.step([(decoding, 70)])[0]], arriving: []}
    for chunk in (1, 20, 2, 31, 21):
        for request, logits in zip((decoding, arriving), run.step([(decoding, 1), (arriving, chunk)]), strict=True):
            found[request].append(logits)
    oracle.check(torch.cat(found[decoding]), PROMPT)
    oracle.check(torch.cat(found[arriving]), arriving.token_ids)


def test_only_the_rows_asked_for(run: PagedRun, oracle: Oracle) -> None:
    request = PagedRequest(PROMPT)
    (none,) = run.step([(request, 30)], logit_rows=[])
    assert none.shape == (0, VOCAB_SIZE)
    assert none.dtype == torch.float32
    (some,) = run.step([(request, 45)], logit_rows=[44, 3])
    oracle.check(some, PROMPT, [74, 33])
