"""How the engine's loop gets its steps run: at once, or on a thread beside it. Order is kept either way."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput

PendingResult = Callable[[], ModelRunnerOutput]


class Runner(Protocol):
    """What computes a step."""

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        """Compute the scheduled tokens and return what was sampled."""


class StepExecutor(Protocol):
    """Takes steps, gives results."""

    def submit(self, output: SchedulerOutput) -> PendingResult:
        """Hand over the next step.

        Returns:
            Waits for the step's end and returns its result, or raises what the runner raised.
        """

    def close(self) -> None:
        """No step follows."""


class DirectExecutor:
    """Runs each step where it is submitted: the loop and the model take turns."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def submit(self, output: SchedulerOutput) -> PendingResult:
        result = _execute(self._runner, output)
        return lambda: result

    def close(self) -> None:
        """Nothing to do."""


class ThreadedExecutor:
    """Runs the steps on a thread of its own, one after the other: the loop schedules the next meanwhile.

    The runner keeps what it sampled, so a step that was scheduled before the tokens of the one before it were known
    finds them there.

    Args:
        runner: Used by that thread only.
        prepare: Called on the thread before the first step.
    """

    def __init__(self, runner: Runner, *, prepare: Callable[[], None] = lambda: None) -> None:
        self._runner = runner
        self._prepare = prepare
        self._steps: queue.SimpleQueue[tuple[SchedulerOutput, Future[ModelRunnerOutput]] | None] = queue.SimpleQueue()
        # A daemon thread: a step that hangs must not keep a stopped process alive.
        threading.Thread(target=self._run, name="engine-steps", daemon=True).start()

    def submit(self, output: SchedulerOutput) -> PendingResult:
        future: Future[ModelRunnerOutput] = Future()
        self._steps.put((output, future))
        return future.result

    def close(self) -> None:
        """Let the thread end after the steps that it has; does not wait for it."""
        self._steps.put(None)

    def _run(self) -> None:
        is_prepared = False
        while (step := self._steps.get()) is not None:
            output, future = step
            try:
                if not is_prepared:
                    self._prepare()
                    is_prepared = True
                future.set_result(_execute(self._runner, output))
            except BaseException as error:  # the loop raises it, and the engine is dead; so is this thread
                future.set_exception(error)
                return


def _execute(runner: Runner, output: SchedulerOutput) -> ModelRunnerOutput:
    started = time.perf_counter()
    result = runner.execute(output)
    result.execute_time_s = time.perf_counter() - started
    return result
