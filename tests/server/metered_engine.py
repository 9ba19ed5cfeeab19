"""The real scheduler and busy loop under the output processor and the metrics; a fake model; the test's thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from engine_core import EngineCoreOutputs, EngineCoreRequest, SamplingParams, SchedulerStats
from engine_core.core import EngineCore
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.step_executor import DirectExecutor
from server.generation import GenerationRequest, Prompt
from server.metrics import ServerMetrics
from server.output_processor import OutputProcessor, OutputStream
from server.records import RequestRecord, StepRecord
from server.stop_strings import StopStrings
from tests.engine_core.fake_runner import FakeModelRunner
from tests.engine_core.scheduler.scheduler_helpers import create_scheduler
from tests.server.fake_engine import CharDecodeStream, char_bytes

STEP_S = 0.25


class SpyingMetrics(ServerMetrics):
    """Keeps what it was told."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__("tiny", clock=clock)
        self.ended: list[RequestRecord] = []
        self.stats: list[SchedulerStats] = []

    def record_step(self, record: StepRecord, stats: SchedulerStats | None) -> None:
        self.ended += record.ended
        self.stats += [stats] * (stats is not None)
        super().record_step(record, stats)


class MeteredEngine:
    """Steps until every request has ended; each step takes STEP_S.

    Attributes:
        while_running: Called during each step with its number, from 1.
        metrics: Of everything.
    """

    def __init__(self, *, max_steps_in_flight: int = 1, **config: Any) -> None:
        self.now = 100.0
        self.while_running: Callable[[int], None] = lambda number: None
        self.metrics = SpyingMetrics(self._clock)
        self.processor = OutputProcessor(
            new_decode_stream=CharDecodeStream, token_bytes=char_bytes, metrics=self.metrics, clock=self._clock
        )
        self.scheduler = create_scheduler(max_steps_in_flight=max_steps_in_flight, **config)
        self._runner = FakeModelRunner(
            num_blocks=self.scheduler.kv_cache.pool.num_blocks,
            block_size=self.scheduler.kv_cache.block_size,
            is_overlapping=max_steps_in_flight > 1,
        )
        self._num_steps = 0
        self._core = EngineCore(
            scheduler=self.scheduler, executor=DirectExecutor(self), publish=self._publish, clock=self._clock
        )

    def add(
        self, request_id: str, prompt: Sequence[int], max_tokens: int, *, stop: Sequence[str] = (), **params: Any
    ) -> OutputStream:
        """Admit a request now."""
        sampling_params = SamplingParams(max_tokens=max_tokens, **params)
        engine_request = EngineCoreRequest(request_id, list(prompt), sampling_params, arrival_time=self.now)
        request = GenerationRequest(engine_request, Prompt(engine_request.prompt_token_ids), StopStrings(stop))
        stream = self.processor.add(request)
        self._core.add_request(engine_request)
        return stream

    def leave(self, request_id: str) -> None:
        """Do what the engine client does when a request's consumer has gone."""
        if self.processor.discard(request_id):
            self._core.abort_requests((request_id,))

    def fail(self, request_id: str) -> None:
        """Let a request's computation go wrong."""
        self._runner.failing_ids.add(request_id)

    def run(self) -> None:
        """Run the busy loop until nobody is left."""
        self._core.run_busy_loop()
        assert not self.metrics._has_failed, "a figure could not be recorded; the log says why"

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Run one step, as the engine's runner does."""
        result = self._runner.execute(output)
        self.now += STEP_S
        if output.req_ids:
            self._num_steps += 1
            self.while_running(self._num_steps)
        return result

    def _publish(self, outputs: EngineCoreOutputs) -> None:
        to_abort = self.processor.process(outputs)
        if to_abort:
            self._core.abort_requests(tuple(to_abort))
        if not self.processor.num_live and not self.scheduler.has_unfinished_requests():
            self._core.stop()

    def _clock(self) -> float:
        return self.now
