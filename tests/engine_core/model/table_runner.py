"""A card's runner on the stand-ins, over a model whose logits are a function of (token, position).

The model also attends, to values that are all 1: whoever reads a slot that nobody wrote gets NaN instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine_core.model import logit_fetcher
from engine_core.model.device_runner import build_device_runner
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from kernels.backend import AttnSpec
from kernels.device_kv import DeviceKV
from kernels.flashinfer_backend import FlashInferBackend
from kernels.testing.fake_cuda import FakeAccelerator, FakeEvent
from kernels.testing.fake_flashinfer import FakeFlashInfer
from tests.kernels.flashinfer_machine import WORKSPACE_BYTES

MAX_MODEL_LEN = 256
PAGE_SIZE = 16
_MAX_REQS = 6
_NUM_PAGES = 1 + 8 * MAX_MODEL_LEN // PAGE_SIZE  # some requests enter twice
_SPEC = AttnSpec(num_q_heads=2, num_kv_heads=1, head_dim=64, sm_scale=0.125)

TokenLogits = Callable[[int, int], torch.Tensor]


class CountingAccelerator(FakeAccelerator):
    """Counts the rows that are reported to the host: one for each row of logits."""

    num_reported = 0

    def download(self, source: torch.Tensor, target: torch.Tensor) -> FakeEvent:
        self.num_reported += len(source) if source.dim() == 1 else 0  # logits have two dimensions
        return super().download(source, target)


class TableModel:
    """What DeviceRunner takes a Decoder for.

    Args:
        table: [vocab_size * MAX_MODEL_LEN, vocab_size], row ``token * MAX_MODEL_LEN + position``. Read at each step.
        backend: Attends.
        max_logit_rows: That come at a time.
    """

    def __init__(self, table: torch.Tensor, backend: FlashInferBackend, max_logit_rows: int) -> None:
        self.arch = SimpleNamespace(vocab_size=table.shape[1], hidden_size=2)
        self.dtype = torch.float32  # of the hidden states: a row of the table, and what attention gave
        self._table = table
        self._backend = backend
        self._max_logit_rows = max_logit_rows

    def reserve_positions(self, num_positions: int) -> None:
        assert num_positions <= MAX_MODEL_LEN

    def hidden(
        self, token_ids: torch.Tensor, positions: torch.Tensor, logit_rows: torch.Tensor, plan: Any, kv: DeviceKV
    ) -> torch.Tensor:
        ones = torch.ones(len(token_ids), 4, _SPEC.head_dim, dtype=torch.bfloat16)
        q, k, v = ones.split_with_sizes((2, 1, 1), 1)
        attended = self._backend.attention(plan, 0, q, k, v, kv).float().mean(1)
        rows = (token_ids * MAX_MODEL_LEN + positions).float()
        return torch.stack((rows, attended), 1).index_select(0, logit_rows)

    def iter_logits(self, hidden: torch.Tensor) -> Iterator[torch.Tensor]:
        for first in range(0, len(hidden), self._max_logit_rows):
            yield self.logits(hidden[first : first + self._max_logit_rows])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._table.index_select(0, hidden[:, 0].long()) * hidden[:, 1:].round()


class TableRunner:
    """One runner, with its pages and its table.

    Attributes:
        page_size: Tokens a block.
        num_logit_rows: How many rows of logits each step was asked for.
    """

    page_size = PAGE_SIZE

    def __init__(
        self, table: torch.Tensor, *, num_token_ids: int | None, max_logit_rows: int, enforce_eager: bool
    ) -> None:
        self.num_logit_rows: list[int] = []
        self._clean, self._table = table, table.clone()
        self._accelerator = CountingAccelerator()
        backend = FlashInferBackend(
            flashinfer=FakeFlashInfer(self._accelerator),
            accelerator=self._accelerator,
            num_workspace_bytes=WORKSPACE_BYTES,
        )
        self._kv = backend.alloc_kv([_SPEC], num_pages=_NUM_PAGES, page_size=PAGE_SIZE, dtype=torch.bfloat16)
        model: Any = TableModel(self._table, backend, max_logit_rows)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(logit_fetcher, "_MAX_BYTES", max_logit_rows * 4 * table.shape[1])
            self._runner = build_device_runner(
                decoder=model,
                kv=self._kv,
                backend=backend,
                max_model_len=MAX_MODEL_LEN,
                max_num_seqs=_MAX_REQS,
                max_num_batched_tokens=128,
                num_token_ids=num_token_ids,
                enforce_eager=enforce_eager,
            )
        self._entered: set[str] = set()

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self._entered.update(new.request_id for new in output.scheduled_new_reqs)
        before = self._accelerator.num_reported
        result = self._runner.execute(output)
        self.num_logit_rows.append(self._accelerator.num_reported - before)
        return result

    def spoil(self, spoiled: dict[tuple[int, int], float]) -> None:
        """Have one of the logits after each (token, position) become something else."""
        for (token_id, position), bad in spoiled.items():
            self._table[token_id * MAX_MODEL_LEN + position, 7] = bad

    def begin_anew(self) -> None:
        """Forget all requests, and what their pages held."""
        self._runner.execute(SchedulerOutput(finished_req_ids=list(self._entered)))
        self._entered.clear()
        self.num_logit_rows = []
        self._table.copy_(self._clean)
        self._kv.layers[0][1:].fill_(float("nan"))  # page 0 is nobody's, and read for padding


class TableRunners:
    """Runners that are used again: their graphs are captured once.

    Args:
        token_logits: What comes after a token at a position.
        vocab_size: Of the model.
    """

    def __init__(self, token_logits: TokenLogits, vocab_size: int) -> None:
        keys = ((token_id, position) for token_id in range(vocab_size) for position in range(MAX_MODEL_LEN))
        self._table = torch.stack([token_logits(*key) for key in keys])
        self._free: dict[tuple[int | None, int], list[TableRunner]] = {}
        self._used: list[tuple[tuple[int | None, int], TableRunner]] = []

    def start(self, *, num_token_ids: int | None, max_logit_rows: int) -> TableRunner:
        """Return a runner that has no requests, until release()."""
        key = (num_token_ids, max_logit_rows)
        free = self._free.setdefault(key, [])
        if not free:
            is_usual = num_token_ids in (None, 20) and max_logit_rows > MAX_MODEL_LEN
            free.append(
                TableRunner(
                    self._table,
                    num_token_ids=num_token_ids,
                    max_logit_rows=max_logit_rows,
                    enforce_eager=not is_usual,
                )
            )
        runner = free.pop()
        runner.begin_anew()
        self._used.append((key, runner))
        return runner

    def release(self) -> None:
        """Take all runners back."""
        for key, runner in self._used:
            self._free[key].append(runner)
        self._used.clear()
