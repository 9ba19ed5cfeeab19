"""Helpers that more than one test package uses: a real engine in its thread, asked and heard from the test's."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from engine_core import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EnginePhase,
    EngineState,
    ModelConfig,
    SamplingParams,
    SchedulerConfig,
)
from engine_core.engine import Engine, open_checkpoint
from engine_core.messages import TokenLogprobs
from engine_core.model.compute import THIS_MACHINE, Machine

_WAIT_S = 120.0


def greedy(max_tokens: int, **overrides: object) -> SamplingParams:
    """Greedy sampling that never stops early."""
    return SamplingParams(**{"max_tokens": max_tokens, "temperature": 0.0, **overrides})  # type: ignore[arg-type]


class EngineDriver:
    """A real Engine in its thread; outputs are collected here, one request a prompt.

    Attributes:
        num_preemptions: Of all requests, as far as their outputs have been waited for.
    """

    def __init__(
        self,
        path: Path,
        *,
        dtype: str = "fp32",
        quantization: str = "none",
        backend: str = "torch",
        cache: CacheConfig = CacheConfig(block_size=32, num_blocks=512),  # noqa: B008 - frozen
        scheduler: SchedulerConfig = SchedulerConfig(),  # noqa: B008 - frozen
        num_token_ids: int | None = None,
        machine: Machine = THIS_MACHINE,
        num_threads: int = 0,
    ) -> None:
        self.outputs: queue.SimpleQueue[EngineCoreOutputs] = queue.SimpleQueue()
        self._settled = threading.Event()
        device = DeviceConfig(backend, num_threads)
        config = EngineConfig(ModelConfig(path, dtype, None, quantization), cache, scheduler, device)
        self.engine = Engine(
            config,
            open_checkpoint(path),
            publish=self.outputs.put,
            on_state=self._note,
            num_token_ids=num_token_ids,
            machine=machine,
        )
        self._num_requests = 0
        self.num_preemptions = 0

    def _note(self, state: EngineState) -> None:
        if state.phase is not EnginePhase.LOADING:
            self._settled.set()

    def __enter__(self) -> EngineDriver:
        self.engine.start()
        assert self._settled.wait(_WAIT_S), "the engine did not load"
        assert self.engine.state.phase is EnginePhase.READY, self.engine.state.detail
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.engine.shutdown(_WAIT_S)

    def submit(self, prompt: Sequence[int], params: SamplingParams) -> str:
        """Hand one request over and return its id."""
        self._num_requests += 1
        request_id = f"r{self._num_requests}"
        self.engine.add_request(EngineCoreRequest(request_id, list(prompt), params, arrival_time=self._num_requests))
        return request_id

    def next_outputs(self) -> list[EngineCoreOutput]:
        """Wait for one step's outputs; lines of the columns come as records."""
        message = self.outputs.get(timeout=_WAIT_S)
        assert message.engine_error is None, message.engine_error
        if message.stats is not None:
            self.num_preemptions += message.stats.num_preempted
        return message.as_records()

    def generate(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams | Sequence[SamplingParams]
    ) -> list[list[int]]:
        """Run all prompts at once, each with its own parameters or all with the same; return each one's tokens."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        asked = zip(prompts, each, strict=True)
        tokens: dict[str, list[int]] = {self.submit(prompt, params): [] for prompt, params in asked}
        running = set(tokens)
        while running:
            for output in self.next_outputs():
                tokens[output.request_id] += output.new_token_ids
                if output.finish_reason:
                    running.remove(output.request_id)
        return list(tokens.values())


def find_worst_gap(path: Path, prompts: Sequence[Sequence[int]], found: Sequence[Sequence[int]]) -> float:
    """Return how far below the reference's likeliest token, in log probability, any of those found is to it."""
    asked: dict[str, list[TokenLogprobs]] = {}
    with EngineDriver(path, cache=CacheConfig(block_size=16, num_blocks=512), num_threads=1) as reference:
        texts = [[*prompt, *tokens] for prompt, tokens in zip(prompts, found, strict=True)]
        ids = [reference.submit(text, greedy(1, num_prompt_logprobs=1)) for text in texts]
        while len(asked) < len(ids):
            asked |= {
                output.request_id: output.prompt_logprobs
                for output in reference.next_outputs()
                if output.prompt_logprobs is not None
            }
    return max(
        each.top_logprobs[0] - each.logprob
        for request_id, tokens in zip(ids, found, strict=True)
        for each in asked[request_id][-len(tokens) :]
    )
