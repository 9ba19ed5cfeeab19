"""The serving process from the open port to the exit code: start, signals, the engine's death, the order of the end.

Knows what to do when, not how: no models, no routes, no flags.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Callable

from starlette.types import ASGIApp

from engine_core import EngineState
from server.engine_run import EngineRun
from server.exit_codes import ExitCode
from server.in_proc_client import InProcEngineClient
from server.listener import create_http_server
from server.startup_report import StartupReport

# After a signal answers may still finish; then streams are told that they end, then connections are closed.
_FINISH_S = 3.0
_CLOSE_S = 5
# After the engine's death /health says so for a moment, and clients read their error events.
_LINGER_S = 1.0


class Daemon:
    """Runs HTTP and the engine together until a signal comes or the engine dies.

    Args:
        client: Not yet started.
        app: The ASGI application over it.
        sock: Listening.
        report: Hears of loading.
        on_ready: Called once, when the model is loaded.
        on_refusal: Told the status of each request that HTTP's parser refuses, unseen by the app.
        linger_s: How long a dead engine's server still answers.
        hard_exit: Ends the process at once.
    """

    def __init__(
        self,
        *,
        client: InProcEngineClient,
        app: ASGIApp,
        sock: socket.socket,
        report: StartupReport,
        on_ready: Callable[[EngineState], None],
        on_refusal: Callable[[int], None],
        linger_s: float = _LINGER_S,
        hard_exit: Callable[[int], object] = os._exit,
    ) -> None:
        self._client = client
        self._engine = EngineRun(client, report, on_ready=self._take_ready, on_dead=self._take_death)
        self._http = create_http_server(app, grace_s=_CLOSE_S, on_refusal=on_refusal)
        self._sock = sock
        self._report = report
        self._on_ready = on_ready
        self._end_streams: Callable[[], None] = lambda: None
        self._linger_s = linger_s
        self._hard_exit = hard_exit
        self._end: asyncio.Future[ExitCode] | None = None

    def end_streams_by(self, callback: Callable[[], None]) -> None:
        """Have this called before connections are waited for, to end those that would last for ever."""
        self._end_streams = callback

    def run(self) -> ExitCode:
        """Serve, on an event loop of its own; return how the process should end."""
        with asyncio.Runner(loop_factory=self._http.config.get_loop_factory()) as runner:
            code = runner.run(self.serve())
        if not self._engine.is_gone:
            # A thread of it may be inside native code, which must not lose the interpreter.
            self._hard_exit(code)
        return code

    async def serve(self) -> ExitCode:
        """Serve on the running loop, which must be the main thread's; return how the process should end."""
        loop = asyncio.get_running_loop()
        self._end = loop.create_future()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._take_signal)
        serving = asyncio.create_task(self._http.serve(sockets=[self._sock]))
        self._engine.start()
        try:
            await asyncio.wait((serving, self._end), return_when=asyncio.FIRST_COMPLETED)
            if self._end.done() and self._end.result() is ExitCode.ENGINE_DIED and self._engine.was_ready:
                await asyncio.sleep(self._linger_s)
            await self._stop_http(serving)
        finally:
            await self._engine.stop()
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)
        return self._end.result()

    async def _stop_http(self, serving: asyncio.Task[None]) -> None:
        cut = asyncio.get_running_loop().call_later(
            _FINISH_S, self._client.fail_all, "The server is shutting down; ask again."
        )
        self._end_streams()
        self._http.should_exit = True
        await serving
        cut.cancel()

    def _take_signal(self) -> None:
        assert self._end is not None
        if self._end.done():
            self._report.line("Stopping at once.")
            self._hard_exit(ExitCode.INTERRUPTED)
            return
        self._report.line("Stopping; once more stops at once.")
        self._end.set_result(ExitCode.OK)

    def _take_ready(self, state: EngineState) -> None:
        assert self._end is not None
        if not self._end.done():  # else it is ready for nobody
            self._on_ready(state)

    def _take_death(self) -> None:
        assert self._end is not None
        if not self._end.done():
            self._end.set_result(ExitCode.ENGINE_DIED)
