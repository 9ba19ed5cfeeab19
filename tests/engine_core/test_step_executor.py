"""Steps run in order, results and failures come back, and the thread ends when it is told to."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.step_executor import DirectExecutor, Runner, StepExecutor, ThreadedExecutor


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


KINDS = pytest.mark.parametrize("kind", [DirectExecutor, ThreadedExecutor])


@KINDS
def test_results_come_back_in_order(kind: Callable[[Runner], StepExecutor]) -> None:
    executor = kind(EchoRunner())
    pending = [executor.submit(SchedulerOutput(step_id)) for step_id in range(5)]
    results = [result() for result in pending]
    executor.close()
    assert [result.token_ids for result in results] == [[0], [1], [2], [3], [4]]
    assert all(result.execute_time_s >= 0.0 for result in results)


@KINDS
def test_a_failing_step_raises_where_its_result_is_asked_for(kind: Callable[[Runner], StepExecutor]) -> None:
    executor = kind(EchoRunner())
    with pytest.raises(RuntimeError, match="device lost"):
        executor.submit(SchedulerOutput(-1))()


def test_the_thread_takes_steps_while_one_runs_and_prepares_itself_first() -> None:
    runner, prepared = EchoRunner(), list[str]()
    runner.gate.clear()
    executor = ThreadedExecutor(runner, prepare=lambda: prepared.append(threading.current_thread().name))
    pending = [executor.submit(SchedulerOutput(step_id)) for step_id in (1, 2)]  # returns although nothing can run
    runner.gate.set()
    assert [result().token_ids for result in pending] == [[1], [2]]
    executor.close()
    assert prepared == ["engine-steps"] and runner.threads == {"engine-steps"}


def test_closing_ends_the_thread_after_the_steps_that_it_has() -> None:
    executor = ThreadedExecutor(EchoRunner())
    result = executor.submit(SchedulerOutput(7))
    executor.close()
    assert result().token_ids == [7]
    for thread in threading.enumerate():
        if thread.name == "engine-steps":
            thread.join(10)
            assert not thread.is_alive()


def test_a_thread_that_cannot_prepare_itself_fails_the_first_step() -> None:
    def fail() -> None:
        raise RuntimeError("no threads left")

    executor = ThreadedExecutor(EchoRunner(), prepare=fail)
    with pytest.raises(RuntimeError, match="no threads left"):
        executor.submit(SchedulerOutput(1))()
