"""EngineCore: the busy loop. Drains its input queue, steps while there is work, publishes what came of it.

Knows no asyncio and no HTTP: ``publish`` is how it is heard.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from engine_core.messages import (
    AbortRequest,
    EngineCommand,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    ResetPrefixCache,
)
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.scheduler.scheduler import Scheduler
from engine_core.scheduler.snapshots import build_snapshot
from engine_core.snapshot import EngineSnapshot, TakeSnapshot
from engine_core.stats import SchedulerStats
from engine_core.step_executor import PendingResult, StepExecutor

logger = logging.getLogger(__name__)

# With requests in hand and nothing to run (a constraint holds everybody back), the loop looks again after so long.
_HELD_WAIT_S = 0.001
# Nobody has asked for anything for so long: time for housekeeping that must not fall into serving.
_REST_AFTER_S = 0.1


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is to be done between two steps, and where the answer goes."""

    command: EngineCommand | TakeSnapshot
    answer: Future[Any]

    @property
    def is_look(self) -> bool:
        """It changes nothing."""
        return isinstance(self.command, TakeSnapshot)


Input = EngineCoreRequest | AbortRequest | _Asked | None  # None: stop


@dataclass(slots=True)
class _StepInFlight:
    """A step handed to the executor."""

    scheduled: SchedulerOutput
    started: float
    schedule_time_s: float
    result: PendingResult


class EngineCore:
    """One scheduler, one executor, one thread.

    With an executor that takes a second step while the first one runs, the loop schedules that second step before it
    waits for the first: the device goes from one to the next without pause.

    Args:
        scheduler: Decides. Its ``max_steps_in_flight`` is how far it runs ahead.
        executor: Runs steps, in order.
        publish: Called on the engine's thread, once a step at most; must not block.
        rest: Called on the engine's thread when nobody has asked for anything for a while.
        clock: Seconds, monotonic.
    """

    def __init__(
        self,
        *,
        scheduler: Scheduler,
        executor: StepExecutor,
        publish: Callable[[EngineCoreOutputs], None],
        rest: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = scheduler
        self._executor = executor
        self._publish = publish
        self._rest = rest
        self._clock = clock
        self._input: queue.SimpleQueue[Input] = queue.SimpleQueue()
        self._in_flight: deque[_StepInFlight] = deque()
        self._preemptions: list[tuple[str, float]] = []
        self._is_stopping = False
        self._last_progress = clock()
        self._is_busy = False
        self._is_held_back = False

    # ------------------------------------------------------------------ any thread
    def add_request(self, request: EngineCoreRequest) -> None:
        """Hand over an admitted request."""
        self._input.put(request)

    def abort_requests(self, request_ids: tuple[str, ...]) -> None:
        """End requests; each that still lives gets a last output with reason ABORT."""
        self._input.put(AbortRequest(request_ids))

    def ask(self, command: EngineCommand | TakeSnapshot, answer: Future[Any]) -> None:
        """Have a command carried out, or a look taken, between two steps.

        Args:
            command: What to do.
            answer: Gets whether it was done, or the ValueError that says why it cannot be, or the EngineSnapshot; on
                the engine's thread. Nothing, if the loop ends first: then it is the owner's to fail.
        """
        self._input.put(_Asked(command, answer))

    def stop(self) -> None:
        """Ask the loop to return after the current step."""
        self._input.put(None)

    def seconds_since_progress(self) -> float:
        """Age of the last finished step, or look at requests that are held back, while there is work; 0 when idle."""
        return self._clock() - self._last_progress if self._is_busy else 0.0

    # ------------------------------------------------------------------ the engine's thread
    def run_busy_loop(self) -> None:
        """Step until stopped. An exception out of here means that the engine is dead."""
        while not self._is_stopping:
            self._drain_input(block=not self._has_work())
            if self._has_work() and not self._is_stopping:
                self.step()

    def step(self) -> None:
        """Schedule a step and hand it on; then, unless another may run ahead, apply the oldest one's result."""
        started = self._clock()
        scheduled = self._scheduler.schedule(started)
        if scheduled.preempted_req_ids:
            self._preemptions += [(request_id, started) for request_id in scheduled.preempted_req_ids]
        if scheduled.has_news:
            schedule_time_s = self._clock() - started
            self._in_flight.append(_StepInFlight(scheduled, started, schedule_time_s, self._executor.submit(scheduled)))
        if scheduled.req_ids and len(self._in_flight) < self._scheduler.max_steps_in_flight:
            return
        if self._in_flight:
            self._finish_oldest()
        else:
            self._wait_held_back()

    def _finish_oldest(self) -> None:
        self._is_held_back = False
        step = self._in_flight.popleft()
        result = step.result()
        # An abort that came while the step ran beats a finish in it (scheduler.md U2).
        self._drain_input(block=False)
        started = self._clock()
        outputs = self._scheduler.update_from_output(step.scheduled, result)
        self._last_progress = now = self._clock()
        stats = self._scheduler.make_stats(
            schedule_time_s=step.schedule_time_s, update_time_s=now - started, step_time_s=now - step.started
        )
        self._publish_step(outputs, stats)

    def _wait_held_back(self) -> None:
        """Nothing runs and nothing may: deliver what schedule() had to end, or wait a moment rather than spin.

        The heart beats meanwhile: a pause is no standstill. A running request that never can go on is the scheduler's
        to end.
        """
        outputs = self._scheduler.update_from_output(SchedulerOutput(), ModelRunnerOutput())
        self._last_progress = self._clock()
        if outputs.outputs or not self._is_held_back:  # the figures once, not a thousand times a second
            self._publish_step(outputs, self._scheduler.make_stats())
        self._is_held_back = True
        if not outputs.outputs:
            self._drain_input(block=True, timeout_s=_HELD_WAIT_S)

    def _publish_step(self, outputs: EngineCoreOutputs, stats: SchedulerStats) -> None:
        for output in outputs.outputs:
            if output.error is not None:  # the client hears it too, but whoever runs the server must not miss it (N3)
                logger.warning("request %s ended with an error: %s", output.request_id, output.error)
        preemptions, self._preemptions = self._preemptions, []
        self._publish(replace(outputs, stats=stats, preemptions=preemptions))

    def _has_work(self) -> bool:
        return bool(
            self._scheduler.has_unfinished_requests() or self._scheduler.has_pending_output() or self._in_flight
        )

    def _drain_input(self, *, block: bool, timeout_s: float | None = None) -> None:
        """Apply everything queued; when idle, wait for the first."""
        ended: list[EngineCoreOutput] = []
        if block and timeout_s is None:
            self._is_busy = False
        for message in self._take_input(block=block, timeout_s=timeout_s):
            self._is_held_back = False
            if not self._is_busy:
                # In this order: another thread may look in between, and must not see the age of an idle engine.
                self._last_progress = self._clock()
                self._is_busy = True
            if message is None:
                self._is_stopping = True
            elif isinstance(message, AbortRequest):
                ended += self._scheduler.abort_requests(message.request_ids)
            elif isinstance(message, _Asked):
                self._answer(message)
            else:
                ended += self._add(message)
        if ended:
            self._publish(EngineCoreOutputs(ended, self._scheduler.make_stats()))

    def _take_input(self, *, block: bool, timeout_s: float | None) -> Iterator[Input]:
        try:
            if block:
                yield self._wait_for_input() if timeout_s is None else self._input.get(timeout=timeout_s)
            while True:
                yield self._input.get_nowait()
        except queue.Empty:
            return

    def _wait_for_input(self) -> Input:
        """Wait as long as it takes; keep house if it takes long."""
        try:
            return self._input.get(timeout=_REST_AFTER_S)
        except queue.Empty:
            self._rest()
        while isinstance(message := self._input.get(), _Asked) and message.is_look:
            self._answer(message)  # being looked at is no work: there is no house to keep after it
        return message

    def _answer(self, asked: _Asked) -> None:
        if not asked.answer.set_running_or_notify_cancel():
            return  # whoever asked has left, and it must not come as a surprise later
        try:
            asked.answer.set_result(self._carry_out(asked.command))
        except Exception as error:
            if not (asked.is_look or isinstance(error, ValueError)):
                raise
            asked.answer.set_exception(error)  # whoever looks must not cost anybody an answer

    def _carry_out(self, command: EngineCommand | TakeSnapshot) -> bool | EngineSnapshot:
        if isinstance(command, TakeSnapshot):
            return build_snapshot(self._scheduler, self._clock())
        if isinstance(command, ResetPrefixCache):
            return self._scheduler.reset_prefix_cache(reset_running=command.reset_running)
        self._scheduler.set_limits(command)
        return True

    def _add(self, request: EngineCoreRequest) -> list[EngineCoreOutput]:
        try:
            self._scheduler.add_request(request)
        except ValueError as error:  # the server checks first; this is the net below it
            logger.warning("refused request %s: %s", request.request_id, error)
            return [EngineCoreOutput(request.request_id, [], FinishReason.ERROR, error=str(error))]
        return []
