"""The engine from its start to its stop, as the process around it sees it. Knows neither HTTP nor files."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from engine_core import EnginePhase, EngineState
from server.exit_codes import ExitCode, code_of_failure
from server.in_proc_client import InProcEngineClient
from server.startup_report import StartupReport

logger = logging.getLogger(__name__)

_STOP_S = 5.0


class EngineRun:
    """Starts an engine, tells the operator how it fares, and stops it; use once.

    Args:
        client: Not yet started.
        report: Hears of loading and of death.
        on_ready: Called once, when the model is loaded.
        on_dead: Called when the engine dies; if it never was ready, its model cannot be loaded.

    Attributes:
        was_ready: The model has been loaded.
        is_gone: It was stopped, and no thread of it is left. Until then the interpreter must not be taken away: a
            thread may be inside native code, loading, or in a step. Even a dead engine may have one: a step scheduled
            ahead that runs on after the one before it failed.
    """

    def __init__(
        self,
        client: InProcEngineClient,
        report: StartupReport,
        *,
        on_ready: Callable[[EngineState], None],
        on_dead: Callable[[], None],
    ) -> None:
        self._client = client
        self._report = report
        self._on_ready = on_ready
        self._on_dead = on_dead
        self.was_ready = False
        self.is_gone = False

    @property
    def is_dead(self) -> bool:
        """Whether nothing that is not answered yet will ever be."""
        return self._client.state.phase is EnginePhase.DEAD

    @property
    def exit_code(self) -> ExitCode:
        """How a process ends whose engine has died."""
        return code_of_failure(self._client.state.failure)

    def start(self) -> None:
        """Start it; call on the running loop, on whose thread the callbacks come."""
        self._client.start(self._take_state)

    async def stop(self, *, is_stuck: bool = False) -> None:
        """Stop it after its current step, and wait a moment for that.

        Args:
            is_stuck: Its current step will not end, so there is nothing to wait for.
        """
        # Loading cannot be interrupted, and nothing is lost when it ends with the process.
        timeout_s = 0.0 if is_stuck or self._client.state.phase is EnginePhase.LOADING else _STOP_S
        self.is_gone = await asyncio.to_thread(self._client.shutdown, timeout_s)

    def _take_state(self, state: EngineState) -> None:
        if state.phase is EnginePhase.LOADING:
            self._report.loading(state)
        elif state.phase is EnginePhase.READY:
            self.was_ready = True
            self._on_ready(state)
        elif state.phase is EnginePhase.DEAD:
            what = "The engine has died" if self.was_ready else "The model cannot be loaded"
            self._tell_failure(f"{what}: {state.detail}")
            self._on_dead()

    def _tell_failure(self, text: str) -> None:
        # Where the report goes into a log it is so much information: whoever is called by errors would not be called.
        if self._report.is_terminal:
            self._report.line(text)
        else:
            logger.error("%s", text)
