"""The real model, scheduler and runner, stepped by the test: what an Engine does in its thread, one call at a time.

The KV pages start as NaN, so whoever reads a slot that nobody wrote gets no token but an error.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from engine_core import EngineCoreOutput, EngineCoreRequest, FinishReason, SamplingParams, SchedulerConfig
from engine_core.engine import open_checkpoint
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.messages import TokenLogprobs
from engine_core.model.decoder import Decoder
from engine_core.model.device_runner import build_device_runner
from engine_core.model.loader import load_decoder
from engine_core.model.runner import ModelRunner
from engine_core.scheduler.constraints import build_constraints
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.scheduler.scheduler import Scheduler
from kernels.backend import Backend, KVPool, create_backend
from kernels.flashinfer_backend import FlashInferBackend

_MAX_MODEL_LEN = 1024
_MAX_STEPS = 1000


Launch = Callable[[SchedulerOutput], Callable[[], ModelRunnerOutput]]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A decoder, and the backend that packed its weights and allocates its pages."""

    backend: Backend
    decoder: Decoder

    def start_runner(self, num_blocks: int, block_size: int) -> Launch:
        """Return what begins a step over pages of its own. Here a step is computed when its result is due."""
        kv = self.alloc_nan_kv(num_blocks, block_size)
        runner = ModelRunner(decoder=self.decoder, kv=kv, max_model_len=_MAX_MODEL_LEN)
        return lambda scheduled: lambda: runner.execute(scheduled)

    def alloc_nan_kv(self, num_blocks: int, block_size: int) -> KVPool:
        """Return pages for ``num_blocks`` blocks and the null block, each number of them NaN."""
        kv = self.backend.alloc_kv(
            self.decoder.layer_specs, num_pages=num_blocks + 1, page_size=block_size, dtype=self.decoder.dtype
        )
        nan = memoryview(np.full(kv.page_bytes // 4, np.nan, np.float32).tobytes())
        for page in range(num_blocks + 1):
            kv.write_page(page, nan)
        return kv


class LoadedDeviceModel(LoadedModel):
    """A decoder on a device. A step begins there as soon as it is scheduled, in a graph where it decodes a few."""

    def start_runner(self, num_blocks: int, block_size: int) -> Launch:
        assert isinstance(self.backend, FlashInferBackend)
        runner = build_device_runner(
            decoder=self.decoder,
            kv=self.alloc_nan_kv(num_blocks, block_size),
            backend=self.backend,
            max_model_len=_MAX_MODEL_LEN,
            max_num_seqs=64,
            max_num_batched_tokens=1024,
        )
        return runner.launch


def load_device_model(path: Path, backend: FlashInferBackend) -> LoadedDeviceModel:
    """Load a checkpoint for a device, bf16."""
    decoder = load_decoder(open_checkpoint(path), backend, torch.bfloat16, lambda share, what: None)
    return LoadedDeviceModel(backend, decoder)


def load_reference_model(path: Path) -> LoadedModel:
    """Load a checkpoint for the reference backend, fp32."""
    backend = create_backend("torch")
    decoder = load_decoder(open_checkpoint(path), backend, torch.float32, lambda share, what: None)
    return LoadedModel(backend, decoder)


@dataclass(frozen=True, slots=True)
class Ask:
    """A request to be: its name is its id."""

    name: str
    prompt: list[int]
    params: SamplingParams
    priority: int = 0


class SteppedEngine:
    """A scheduler with its own prefix cache and a runner with its own pages, over a model that is shared.

    With more than one step in flight, the reference executes a step as late as it may: when its result is due.

    Attributes:
        steps: Every step that was scheduled.
        token_ids: Output tokens by request id.
        logprobs: Of the output tokens, by request id, where asked for.
        prompt_logprobs: Of the prompt's tokens, by request id, where asked for.
        num_cached_tokens: Prompt tokens that each request found in the cache when it was first admitted.
        num_preemptions: How often each request lost its blocks.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        num_blocks: int = 64,
        block_size: int = 16,
        enable_prefix_caching: bool = True,
        max_steps_in_flight: int = 1,
        **scheduler: Any,
    ) -> None:
        config = SchedulerConfig(**scheduler)
        self.scheduler = Scheduler(
            config=config,
            kv_cache=KVCacheManager(
                num_blocks=num_blocks, block_size=block_size, enable_prefix_caching=enable_prefix_caching
            ),
            max_model_len=_MAX_MODEL_LEN,
            constraints=build_constraints(config, block_size=block_size),
            max_steps_in_flight=max_steps_in_flight,
        )
        self._launch = model.start_runner(num_blocks, block_size)
        self.steps: list[SchedulerOutput] = []
        self.token_ids: dict[str, list[int]] = {}
        self.logprobs: dict[str, list[TokenLogprobs]] = {}
        self.prompt_logprobs: dict[str, list[TokenLogprobs]] = {}
        self.num_cached_tokens: dict[str, int] = {}
        self.num_preemptions: Counter[str] = Counter()
        self._in_flight: deque[tuple[SchedulerOutput, Callable[[], ModelRunnerOutput]]] = deque()

    def add(self, ask: Ask) -> None:
        """Let a request wait."""
        self.token_ids[ask.name] = []
        self.scheduler.add_request(
            EngineCoreRequest(
                ask.name,
                list(ask.prompt),
                ask.params,
                arrival_time=0.0,
                priority=ask.priority,
                skip_reading_prefix_cache=ask.params.num_prompt_logprobs is not None,
            )
        )

    def generate(
        self,
        asks: Sequence[Ask],
        *,
        is_squeezed: Callable[[int], bool] = lambda index: False,
        after_step: Callable[[int], None] = lambda index: None,
    ) -> dict[str, list[int]]:
        """Add requests and step until nothing is left to do.

        Args:
            asks: In the order of their arrival.
            is_squeezed: Given the number of a step, tells whether it finds no free block.
            after_step: Called with its number after each step.

        Returns:
            The output tokens of each request of this engine so far.
        """
        for ask in asks:
            self.add(ask)
        for index in range(_MAX_STEPS):
            if not self._has_work():
                return self.token_ids
            self._step(is_squeezed=is_squeezed(index))
            after_step(index)
        raise AssertionError("the requests do not come to an end")

    def _has_work(self) -> bool:
        return bool(self.scheduler.has_unfinished_requests() or self.scheduler.has_pending_output() or self._in_flight)

    def _step(self, *, is_squeezed: bool) -> None:
        scheduled = self._schedule_squeezed() if is_squeezed else self.scheduler.schedule(float(len(self.steps)))
        self.scheduler.check_invariants()
        self.steps.append(scheduled)
        if scheduled.has_news:
            self._in_flight.append((scheduled, self._launch(scheduled)))
        is_ahead = scheduled.req_ids and len(self._in_flight) < self.scheduler.max_steps_in_flight
        if self._in_flight and not is_ahead:
            self._finish_oldest()

    def _schedule_squeezed(self) -> SchedulerOutput:
        """Schedule a step with the pool shrunk to what is in use: whoever needs a block must take it from another."""
        pool = self.scheduler.kv_cache.pool
        held = pool.allocate(pool.num_free)
        scheduled = self.scheduler.schedule(float(len(self.steps)))
        pool.free(held)
        return scheduled

    def _finish_oldest(self) -> None:
        scheduled, wait = self._in_flight.popleft()
        self.num_preemptions.update(scheduled.preempted_req_ids)
        outputs = self.scheduler.update_from_output(scheduled, wait())
        self.scheduler.check_invariants()
        for output in outputs.as_records():
            self._take(output)

    def _take(self, output: EngineCoreOutput) -> None:
        assert output.finish_reason is not FinishReason.ERROR, f"{output.request_id}: {output.error}"
        tokens = self.token_ids[output.request_id]
        if not tokens:
            self.num_cached_tokens[output.request_id] = output.num_cached_tokens
        tokens += output.new_token_ids
        if output.logprobs is not None:
            self.logprobs.setdefault(output.request_id, []).extend(output.logprobs)
        if output.prompt_logprobs is not None:
            assert output.request_id not in self.prompt_logprobs, "prompt logprobs come once"
            self.prompt_logprobs[output.request_id] = output.prompt_logprobs
