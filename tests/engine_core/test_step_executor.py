"""Steps run in order, results and failures come back, and the thread ends when it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest

from engine_core import step_executor
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.step_executor import DirectExecutor, OverlappedExecutor, StepExecutor, StepThread, ThreadedExecutor


class EchoRunner:
    """Returns a step's id as its token; waits for ``gate`` first."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.threads: set[str] = set()

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        assert self.gate.wait(10)
        self.threads.add(threading.current_thread().name)
        if output.step_id < 0:
            raise RuntimeError("device lost")
        return ModelRunnerOutput([output.step_id])


class EchoDevice:
    """Begins steps at once, and has a step's id as its token when it is waited for."""

    def __init__(self) -> None:
        self.log: list[str] = []

    def launch(self, output: SchedulerOutput) -> Callable[[], ModelRunnerOutput]:
        self.log.append(f"launch {output.step_id}")

        def wait() -> ModelRunnerOutput:
            self.log.append(f"wait {output.step_id}")
            if output.step_id < 0:
                raise RuntimeError("device lost")
            return ModelRunnerOutput([output.step_id])

        return wait


@pytest.fixture
def thread() -> Iterator[StepThread]:
    thread = StepThread()
    yield thread
    thread.close()


@pytest.fixture(params=["direct", "threaded", "overlapped"])
def executor(request: pytest.FixtureRequest, thread: StepThread) -> StepExecutor:
    if request.param == "overlapped":
        return OverlappedExecutor(EchoDevice())
    return DirectExecutor(EchoRunner()) if request.param == "direct" else ThreadedExecutor(EchoRunner(), thread)


def test_results_come_back_in_order(executor: StepExecutor) -> None:
    pending = [executor.submit(SchedulerOutput(step_id)) for step_id in range(5)]
    results = [result() for result in pending]
    assert [result.token_ids for result in results] == [[0], [1], [2], [3], [4]]
    assert all(result.execute_time_s > 0.0 for result in results)


def test_a_failing_step_raises_its_error(executor: StepExecutor) -> None:
    with pytest.raises(RuntimeError, match="device lost"):
        executor.submit(SchedulerOutput(-1))()


def test_the_thread_takes_steps_while_one_runs(thread: StepThread) -> None:
    runner = EchoRunner()
    runner.gate.clear()
    executor = ThreadedExecutor(runner, thread)
    pending = [executor.submit(SchedulerOutput(step_id)) for step_id in (1, 2)]  # returns although nothing can run
    runner.gate.set()
    assert [result().token_ids for result in pending] == [[1], [2]]
    assert runner.threads == {"engine-steps"}


def test_closing_waits_for_the_thread_to_end_after_the_calls_that_it_has() -> None:
    before = set(threading.enumerate())
    thread = StepThread()
    (mine,) = set(threading.enumerate()) - before
    future = thread.submit(lambda: 7)
    thread.close()
    assert future.result(0) == 7 and not mine.is_alive()


def test_a_call_that_fails_does_not_end_the_thread(thread: StepThread) -> None:
    with pytest.raises(ZeroDivisionError):
        thread.submit(lambda: 1 // 0).result()
    assert thread.submit(lambda: 7).result() == 7


def test_a_device_is_given_the_next_step_before_anybody_waits() -> None:
    device = EchoDevice()
    executor = OverlappedExecutor(device)
    first, second = executor.submit(SchedulerOutput(1)), executor.submit(SchedulerOutput(2))
    assert (first().token_ids, second().token_ids) == ([1], [2])
    assert device.log == ["launch 1", "launch 2", "wait 1", "wait 2"]


def test_a_step_is_timed_from_its_launch_or_the_end_of_the_one_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches at 10, 11 and 40; ends at 20, 26 and 45."""
    times = iter([10.0, 11.0, 20.0, 26.0, 40.0, 45.0])
    monkeypatch.setattr(step_executor.time, "perf_counter", lambda: next(times))
    executor = OverlappedExecutor(EchoDevice())
    first, second = executor.submit(SchedulerOutput(1)), executor.submit(SchedulerOutput(2))
    taken = [first().execute_time_s, second().execute_time_s, executor.submit(SchedulerOutput(3))().execute_time_s]
    assert taken == [10.0, 6.0, 5.0]
