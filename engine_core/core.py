"""EngineCore: the busy loop. Drains its input queue, steps while there is work, publishes what came of it.

Knows no asyncio and no HTTP: ``publish`` is how it is heard.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Iterator
from typing import Protocol

from engine_core.messages import AbortRequest, EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.scheduler.scheduler import Scheduler

logger = logging.getLogger(__name__)

Input = EngineCoreRequest | AbortRequest | None  # None: stop


class Runner(Protocol):
    """What executes a step."""

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the scheduled tokens and return what was sampled."""


class EngineCore:
    """One scheduler, one runner, one thread.

    Args:
        scheduler: Decides.
        runner: Executes.
        publish: Called on the engine's thread, once a step at most; must not block.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        runner: Runner,
        publish: Callable[[EngineCoreOutputs], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._publish = publish
        self._clock = clock
        self._input: queue.SimpleQueue[Input] = queue.SimpleQueue()
        self._is_stopping = False
        self._last_progress = clock()
        self._is_busy = False

    # ------------------------------------------------------------------ any thread
    def add_request(self, request: EngineCoreRequest) -> None:
        """Hand over an admitted request."""
        self._input.put(request)

    def abort_requests(self, request_ids: tuple[str, ...]) -> None:
        """End requests; each that still lives gets a last output with reason ABORT."""
        self._input.put(AbortRequest(request_ids))

    def stop(self) -> None:
        """Ask the loop to return after the current step."""
        self._input.put(None)

    def seconds_since_progress(self) -> float:
        """Age of the last finished step while there is work in hand; 0 when idle."""
        return self._clock() - self._last_progress if self._is_busy else 0.0

    # ------------------------------------------------------------------ the engine's thread
    def run_busy_loop(self) -> None:
        """Step until stopped. An exception out of here means that the engine is dead."""
        while not self._is_stopping:
            self._drain_input(block=not self._has_work())
            if self._has_work() and not self._is_stopping:
                self.step()

    def step(self) -> None:
        """Schedule, execute, apply the results, publish."""
        started = self._clock()
        scheduled = self._scheduler.schedule(started)
        result = self._runner.execute(scheduled)
        # An abort that came while the step ran beats a finish in it (scheduler.md U2).
        self._drain_input(block=False)
        outputs = self._scheduler.update_from_output(scheduled, result)
        self._last_progress = self._clock()
        self._publish(EngineCoreOutputs(outputs, self._scheduler.make_stats(self._last_progress - started)))

    def _has_work(self) -> bool:
        return self._scheduler.has_unfinished_requests() or self._scheduler.has_pending_output()

    def _drain_input(self, *, block: bool) -> None:
        """Apply everything queued; when idle, wait for the first."""
        ended: list[EngineCoreOutput] = []
        if block:
            self._is_busy = False
        for message in self._take_input(block=block):
            if not self._is_busy:
                # In this order: another thread may look in between, and must not see the age of an idle engine.
                self._last_progress = self._clock()
                self._is_busy = True
            if message is None:
                self._is_stopping = True
            elif isinstance(message, AbortRequest):
                ended += self._scheduler.abort_requests(message.request_ids)
            else:
                ended += self._add(message)
        if ended:
            self._publish(EngineCoreOutputs(ended, self._scheduler.make_stats(0.0)))

    def _take_input(self, *, block: bool) -> Iterator[Input]:
        try:
            while True:
                yield self._input.get(block=block)
                block = False
        except queue.Empty:
            return

    def _add(self, request: EngineCoreRequest) -> list[EngineCoreOutput]:
        try:
            self._scheduler.add_request(request)
        except ValueError as error:  # the server checks first; this is the net below it
            logger.warning("refused request %s: %s", request.request_id, error)
            return [EngineCoreOutput(request.request_id, [], FinishReason.ERROR, error=str(error))]
        return []
