"""The serving process from the open port to the exit code: start, signals, draining, the engine's death or standstill.

Knows what to do when, not how: no models, no routes, no flags.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field

from starlette.types import ASGIApp

from engine_core import EnginePhase, EngineState
from server.errors import EngineStuckError, ErrorKind, RequestError
from server.exit_codes import ExitCode
from server.http.connection import HttpTimeouts
from server.http.listener import create_http_server
from server.in_proc_client import InProcEngineClient
from server.lifecycle.drain import Drain
from server.lifecycle.engine_run import EngineRun
from server.lifecycle.watchdog import Watchdog, WatchdogHooks, dump_stacks
from server.startup_report import StartupReport

# What clients are told at the end gets so long to reach them; then their connections are cut. uvicorn's own patience,
# after which it cancels what still runs and fills the log, is longer and never needed.
_FLUSH_S = 2.0
_CLOSE_S = 5
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """How patient the process is.

    Attributes:
        drain_timeout_s: With running requests, once it is told to stop.
        watchdog_timeout_s: With a step, or with the event loop; 0 = for ever.
        http: With clients.
        linger_s: So long a dead engine's server still answers: /health says so, and clients read their error events.
    """

    drain_timeout_s: float = 30.0
    watchdog_timeout_s: float = 120.0
    http: HttpTimeouts = field(default_factory=HttpTimeouts)
    linger_s: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonHooks:
    """Who hears of what, on the event loop's thread.

    Attributes:
        on_ready: Called once, when the model is loaded.
        on_refusal: Told the status of each request that HTTP's parser refuses, unseen by the app.
        on_near_miss: Called when half of the watchdog's deadline has passed.
    """

    on_ready: Callable[[EngineState], None]
    on_refusal: Callable[[int], None]
    on_near_miss: Callable[[], None]


class Daemon:
    """Runs HTTP and the engine together until a signal comes, or the engine dies or stands still. Use once.

    Args:
        client: Not yet started.
        app: The ASGI application over it.
        drain: Of the app's requests for generations.
        sock: Listening.
        report: Hears of loading and of the end.
        hooks: Who hears of the rest.
        settings: How patient it is.
        hard_exit: Ends the process at once.
    """

    def __init__(
        self,
        *,
        client: InProcEngineClient,
        app: ASGIApp,
        drain: Drain,
        sock: socket.socket,
        report: StartupReport,
        hooks: DaemonHooks,
        settings: DaemonSettings,
        hard_exit: Callable[[int], object] = os._exit,
    ) -> None:
        self._client = client
        self._engine = EngineRun(client, report, on_ready=self._take_ready, on_dead=self._take_death)
        self._http = create_http_server(app, grace_s=_CLOSE_S, on_refusal=hooks.on_refusal, timeouts=settings.http)
        self._drain = drain
        self._sock = sock
        self._report = report
        self._hooks = hooks
        self._settings = settings
        self._end_streams: Callable[[], None] = lambda: None
        self._hard_exit = hard_exit
        self._num_signals = 0
        self._end: asyncio.Event | None = None
        self._code = ExitCode.OK

    def use_tls(self, context: ssl.SSLContext) -> None:
        """Encrypt connections; call before running."""
        self._http.use_tls(context)

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
        self._end = asyncio.Event()
        handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._take_signal)
        serving = asyncio.create_task(self._http.serve(sockets=[self._sock]))
        self._engine.start()
        watchdog = self._create_watchdog(loop)
        watchdog.start()
        try:
            await self._wait_for_end(serving)
            await self._wind_down()
            await self._stop_http(serving)
        finally:
            is_stuck = self._code is ExitCode.STUCK
            await self._engine.stop(is_stuck=is_stuck)
            if not is_stuck:  # else it ends the process, should this one not come to that
                watchdog.stop()
            for number, handler in handlers.items():
                loop.remove_signal_handler(number)
                signal.signal(number, handler)
        return self._code

    async def _wait_for_end(self, serving: asyncio.Task[None]) -> None:
        assert self._end is not None
        ended = asyncio.create_task(self._end.wait())
        await asyncio.wait((serving, ended), return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()

    async def _wind_down(self) -> None:
        """Let clients have what they still can get."""
        if self._code is ExitCode.OK:
            if not await self._drain.wait_empty(self._settings.drain_timeout_s):
                self._client.fail_all("The server is shutting down; ask again.")
                await self._drain.wait_empty(_FLUSH_S)
        elif self._engine.is_dead and self._engine.was_ready:
            await asyncio.sleep(self._settings.linger_s)

    async def _stop_http(self, serving: asyncio.Task[None]) -> None:
        cut = asyncio.get_running_loop().call_later(_FLUSH_S, self._http.cut_connections)
        self._drain.stop_reading(_build_refusal())
        self._end_streams()
        self._http.should_exit = True
        await serving
        cut.cancel()

    def _create_watchdog(self, loop: asyncio.AbstractEventLoop) -> Watchdog:
        hooks = WatchdogHooks(
            read_engine_age=self._read_engine_age,
            post=loop.call_soon_threadsafe,
            on_fine=self._report.manager.feed_watchdog,
            on_near_miss=self._hooks.on_near_miss,
            on_stuck=self._take_stuck,
            dump_stacks=dump_stacks,
            end_process=self._hard_exit,
        )
        return Watchdog(self._settings.watchdog_timeout_s, hooks)

    def _read_engine_age(self) -> float:
        # Loading takes as long as it takes, and a dead engine is nobody's hope.
        return self._client.seconds_since_progress() if self._client.state.phase is EnginePhase.READY else 0.0

    # ------------------------------------------------------------------ what happens
    def _finish(self, code: ExitCode) -> None:
        """Begin the end; or, where it has begun, let it be the failure that it has become."""
        assert self._end is not None
        if self._code is ExitCode.OK:
            self._code = code
        self._end.set()

    def _take_signal(self) -> None:
        self._num_signals += 1
        if self._num_signals > 1:
            self._report.line("Stopping at once.")
            self._hard_exit(ExitCode.INTERRUPTED)
        elif not self._has_ended:
            self._drain.begin(_build_refusal())
            self._report.stopping(self._drain.num_in_hand, self._settings.drain_timeout_s)
            self._finish(ExitCode.OK)

    def _take_ready(self, state: EngineState) -> None:
        if not self._has_ended:  # else it is ready for nobody
            self._hooks.on_ready(state)

    def _take_death(self) -> None:
        self._finish(self._engine.exit_code)

    def _take_stuck(self, what: str) -> None:
        message = f"{what} This server ends, and may be started anew: ask again in a moment."
        self._report.line(f"pointsman: {what}")
        self._drain.begin(RequestError(message, kind=ErrorKind.ENGINE_STUCK))
        self._client.fail_all(message, EngineStuckError)
        self._finish(ExitCode.STUCK)

    @property
    def _has_ended(self) -> bool:
        return self._end is not None and self._end.is_set()


def _build_refusal() -> RequestError:
    message = "The server is shutting down and takes no more requests; ask again, here or elsewhere."
    return RequestError(message, kind=ErrorKind.DRAINING)
