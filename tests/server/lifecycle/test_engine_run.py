from __future__ import annotations

import io
from typing import Any

import pytest

from engine_core import EnginePhase, EngineState
from server.in_proc_client import InProcEngineClient
from server.lifecycle.engine_run import EngineRun
from server.metrics import ServerMetrics
from server.output_processor import OutputProcessor
from server.startup_report import StartupReport
from tests.server.fake_engine import READY, CharDecodeStream, FakeEngine, char_bytes


class Run:
    """An EngineRun whose engine goes through these states when it is started, and what came of it."""

    def __init__(self, *states: EngineState) -> None:
        engines: list[FakeEngine] = []

        def create_engine(*callbacks: Any) -> FakeEngine:
            engines.append(FakeEngine(*callbacks))
            return engines[0]

        processor = OutputProcessor(
            new_decode_stream=CharDecodeStream, token_bytes=char_bytes, metrics=ServerMetrics("m")
        )
        client = InProcEngineClient(create_engine, processor)
        self.engine, self.text, self.heard = engines[0], io.StringIO(), list[str]()
        self.report = StartupReport(self.text)
        self.engine.start = self._start  # type: ignore[method-assign]
        self._states = states
        self.run = EngineRun(
            client,
            self.report,
            on_ready=lambda state: self.heard.append(state.phase),
            on_dead=lambda: self.heard.append("dead"),
        )

    def _start(self) -> None:
        for state in self._states:
            self.engine.set_state(state)

    async def go_through(self) -> None:
        """Start, and stop, by when each state has been heard of."""
        self.run.start()
        await self.run.stop()


LOADING, DEAD = EngineState(EnginePhase.LOADING, "weights", 0.5), EngineState(EnginePhase.DEAD, "it broke")


@pytest.mark.parametrize(
    ("states", "heard", "told", "timeout_s"),
    [
        ([LOADING], [], "Loading  50%  weights\n", 0.0),
        ([READY], ["ready"], "", 5.0),
        ([DEAD], ["dead"], "", 5.0),
        ([READY, DEAD], ["ready", "dead"], "", 5.0),
    ],
)
async def test_each_state_is_told_to_whom_it_concerns_and_only_loading_is_not_waited_for(
    states: list[EngineState], heard: list[str], told: str, timeout_s: float
) -> None:
    run = Run(*states)
    await run.go_through()
    assert (run.heard, run.text.getvalue()) == (heard, told)
    assert run.engine.shutdown_timeouts == [timeout_s]
    assert run.run.was_ready is (READY in states)
    assert run.run.is_dead is (DEAD in states)


@pytest.mark.parametrize(
    ("states", "told"),
    [([DEAD], "The model cannot be loaded: it broke"), ([READY, DEAD], "The engine has died: it broke")],
)
@pytest.mark.parametrize("is_terminal", [False, True])
async def test_what_it_died_of_is_an_error_of_the_log_or_stands_on_the_operators_terminal(
    states: list[EngineState], told: str, is_terminal: bool, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(*states)
    run.report.is_terminal = is_terminal
    await run.go_through()
    logged = [(record.levelname, record.getMessage()) for record in caplog.records]
    assert (run.text.getvalue(), logged) == ((f"{told}\n", []) if is_terminal else ("", [("ERROR", told)]))


async def test_a_stuck_engine_is_not_waited_for() -> None:
    run = Run(READY)
    run.run.start()
    await run.run.stop(is_stuck=True)
    assert run.engine.shutdown_timeouts == [0.0]


@pytest.mark.parametrize("ends_in_time", [True, False])
async def test_it_is_gone_when_no_thread_is_left(ends_in_time: bool) -> None:
    run = Run(READY)
    run.engine.ends_in_time = ends_in_time
    assert not run.run.is_gone
    await run.go_through()
    assert run.run.is_gone is ends_in_time
