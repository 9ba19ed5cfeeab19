"""Which steps are captured, in what order and with what progress, and which graph a step takes."""

from __future__ import annotations

import pytest

from engine_core.model.device_graphs import StepGraphs
from engine_core.model.device_sampler import Draw
from tests.engine_core.model.device_steps import Machine, build_machine


@pytest.fixture(scope="module")
def machine() -> Machine:
    return build_machine(sizes=(1, 3, 5))


def test_the_largest_steps_are_captured_first_and_whoever_waits_is_told(machine: Machine) -> None:
    told: list[tuple[float, str]] = []
    machine.backend.plans.clear()
    machine.accelerator.log.clear()
    machine.new_runner(max_num_seqs=4, on_progress=lambda share, line: told.append((share, line)))
    # No size above what may run at once; shared pages from 3 requests on.
    num_shared = machine.backend.plans[1][1]
    assert machine.backend.plans == [(3, 0, True), (3, num_shared, True), (1, 0, True)] and num_shared > 0
    total = 3 + 2 * len(Draw)
    assert machine.accelerator.log.count("capture") == total
    assert [line for _, line in told] == [f"capturing graphs {count} of {total}" for count in range(1, total + 1)]
    assert [share for share, _ in told] == [count / total for count in range(total)]


def test_each_graph_was_run_once_before_it_was_captured(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch or a library sets up at first use must not be part of a graph."""
    capture, runs = machine.accelerator.capture, []
    hidden = machine.decoder.hidden

    def note(*args: object) -> object:
        runs.append("run")
        return hidden(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(machine.decoder, "hidden", note)
    monkeypatch.setattr(machine.accelerator, "capture", lambda body: (runs.append("capture"), capture(body))[1])
    machine.new_runner(max_num_seqs=1)
    assert runs == ["run", "capture", "run", *["capture"] * len(Draw)]


def test_nothing_is_captured_where_nothing_shall_be(machine: Machine) -> None:
    machine.accelerator.log.clear()
    machine.new_runner(enforce_eager=True)
    assert machine.accelerator.count("capture") == 0


def test_a_step_takes_the_smallest_size_that_holds_it() -> None:
    graphs = StepGraphs((1, 2, 4, 8))
    assert [graphs.size_for(num_reqs) for num_reqs in range(1, 10)] == [1, 2, 4, 4, 8, 8, 8, 8, 0]
    assert StepGraphs().size_for(1) == 0
