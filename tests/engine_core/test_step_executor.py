"""Steps run in order, results and failures come back, and the thread ends when it is told to."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.step_executor import DirectExecutor, StepExecutor, StepThread, ThreadedExecutor


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


@pytest.fixture
def thread() -> Iterator[StepThread]:
    thread = StepThread()
    yield thread
    thread.close()


@pytest.fixture(params=["direct", "threaded"])
def executor(request: pytest.FixtureRequest, thread: StepThread) -> StepExecutor:
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
