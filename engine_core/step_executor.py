"""How the engine's loop gets its steps run: at once, or on a thread beside it. Order is kept either way."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol, TypeVar

from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput

T = TypeVar("T")
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


class DirectExecutor:
    """Runs each step where it is submitted: the loop and the model take turns."""

    def __init__(self, runner: Runner) -> None:
        self._runner = runner

    def submit(self, output: SchedulerOutput) -> PendingResult:
        result = _execute(self._runner, output)
        return lambda: result


class StepThread:
    """A thread that calls what it is given, in order. Model work stays on one thread: compute threads belong to it."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # A daemon thread: a step that hangs must not keep a stopped process alive.
        self._thread = threading.Thread(target=self._run, name="engine-steps", daemon=True)
        self._thread.start()

    def submit(self, call: Callable[[], T]) -> Future[T]:
        """Queue a call; its result, or what it raised, comes through the future."""
        future: Future[T] = Future()

        def run() -> None:
            try:
                future.set_result(call())
            except BaseException as error:  # whoever asks for the result raises it
                future.set_exception(error)

        self._calls.put(run)
        return future

    def close(self) -> None:
        """Let the thread end after the calls that it has, and wait for that."""
        self._calls.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()


class ThreadedExecutor:
    """Runs the steps on a thread beside the loop, which schedules the next one meanwhile.

    The runner keeps what it sampled, so a step that was scheduled before the tokens of the one before it were known
    finds them there.

    Args:
        runner: Used by that thread only.
        thread: Where it runs.
    """

    def __init__(self, runner: Runner, thread: StepThread) -> None:
        self._runner = runner
        self._thread = thread

    def submit(self, output: SchedulerOutput) -> PendingResult:
        return self._thread.submit(lambda: _execute(self._runner, output)).result


def _execute(runner: Runner, output: SchedulerOutput) -> ModelRunnerOutput:
    started = time.perf_counter()
    result = runner.execute(output)
    result.execute_time_s = time.perf_counter() - started
    return result
