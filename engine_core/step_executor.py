"""How the engine's loop gets its steps run: at once, on a thread, or on a device beside it. Order is kept in each."""

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


class OverlappingRunner(Protocol):
    """What begins a step without waiting for it."""

    def launch(self, output: SchedulerOutput) -> PendingResult:
        """Begin the next step; the result is waited for, and steps end in their order."""


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


class OverlappedExecutor:
    """Has a device begin each step as it is submitted: it goes on from the one before it while the loop schedules.

    A step's time is counted from its launch, or from the end of the step before it where that came later.

    Args:
        runner: Used by the thread that submits and waits.
    """

    def __init__(self, runner: OverlappingRunner) -> None:
        self._runner = runner
        self._ended = 0.0

    def submit(self, output: SchedulerOutput) -> PendingResult:
        launched = time.perf_counter()
        pending = self._runner.launch(output)

        def wait() -> ModelRunnerOutput:
            result = pending()
            ended = time.perf_counter()
            result.execute_time_s = ended - max(launched, self._ended)
            self._ended = ended
            return result

        return wait


def _execute(runner: Runner, output: SchedulerOutput) -> ModelRunnerOutput:
    started = time.perf_counter()
    result = runner.execute(output)
    result.execute_time_s = time.perf_counter() - started
    return result
