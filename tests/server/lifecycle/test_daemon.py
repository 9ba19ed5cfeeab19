from __future__ import annotations

import asyncio
import io
import json
import logging
import os
import signal
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from engine_core import EngineDeadError, EngineFailure, EnginePhase, EngineState, FinishReason
from server.errors import EngineStuckError, RequestError, ServerStoppingError, build_error_response
from server.exit_codes import ExitCode
from server.http.listener import bind, listen
from server.in_proc_client import InProcEngineClient
from server.lifecycle.daemon import Daemon, DaemonHooks, DaemonSettings
from server.lifecycle.drain import Drain, DrainMiddleware
from server.lifecycle.service_manager import ServiceManager
from server.metrics import ServerMetrics
from server.output_processor import OutputProcessor
from server.startup_report import StartupReport
from server.streaming import EventStream, StreamTiming
from tests.server.fake_engine import READY, CharDecodeStream, FakeEngine, char_bytes, create_request, output

STREAM = "/v1/completions"


class SpyingManager(ServiceManager):
    """A service manager that is here, and remembers what it was told."""

    def __init__(self) -> None:
        super().__init__("nowhere")
        self.told: list[str] = []

    def _send(self, message: str) -> None:
        self.told.append(message)


@dataclass
class Running:
    """A daemon serving on a free port, over an engine that the test drives."""

    engine: FakeEngine
    client: InProcEngineClient
    task: asyncio.Task[ExitCode]
    http: httpx.AsyncClient
    text: io.StringIO
    manager: SpyingManager
    ready: list[EngineState] = field(default_factory=list)
    refusals: list[int] = field(default_factory=list)
    hard_exits: list[int] = field(default_factory=list)
    near_misses: list[str] = field(default_factory=list)

    async def begin_stream(self) -> asyncio.Task[httpx.Response]:
        """Ask for a stream; the engine has its request when this returns."""
        answer = asyncio.create_task(self.http.get(STREAM))
        await self.engine.got_request.wait()
        return answer


def create_app(client: InProcEngineClient) -> Callable[..., Any]:
    """STREAM runs one request, once its body is there; everything else tells the engine's phase."""

    async def stream() -> AsyncGenerator[bytes, None]:
        try:
            async for part in client.generate(create_request()):
                yield part.text.encode()
        except (EngineDeadError, EngineStuckError, ServerStoppingError) as error:
            yield f"error: {error}".encode()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for phase in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{phase}.complete"})
        elif scope["path"] == STREAM:
            try:
                await Request(scope, receive).body()
            except RequestError as error:
                await build_error_response(error)(scope, receive, send)
                return
            await EventStream(stream(), timing=StreamTiming())(scope, receive, send)
        else:
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": json.dumps(client.state.phase).encode()})

    return app


def create_client(create_engine: Callable[..., FakeEngine]) -> InProcEngineClient:
    processor = OutputProcessor(
        new_decode_stream=CharDecodeStream, token_bytes=char_bytes, metrics=ServerMetrics("tiny")
    )
    return InProcEngineClient(create_engine, processor)


@asynccontextmanager
async def running_daemon(*, loads: bool = True, **settings: float) -> AsyncIterator[Running]:
    engines: list[FakeEngine] = []

    def create_engine(*callbacks: Any) -> FakeEngine:
        engine = FakeEngine(*callbacks)
        if not loads:
            engine.start = lambda: engine.set_state(EngineState(EnginePhase.LOADING, "weights", 0.5))  # type: ignore[method-assign]
        engines.append(engine)
        return engine

    client, drain = create_client(create_engine), Drain()
    sock, text, manager = bind("127.0.0.1", 0), io.StringIO(), SpyingManager()
    ready, refusals, hard_exits, near_misses = list[EngineState](), list[int](), list[int](), list[str]()
    listen(sock)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    daemon = Daemon(
        client=client,
        app=DrainMiddleware(create_app(client), drain),
        drain=drain,
        sock=sock,
        report=StartupReport(text, manager),
        hooks=DaemonHooks(
            on_ready=ready.append, on_refusal=refusals.append, on_near_miss=lambda: near_misses.append("near")
        ),
        settings=DaemonSettings(**{"linger_s": 0.0, **settings}),  # type: ignore[arg-type]
        hard_exit=hard_exits.append,
    )
    task = asyncio.create_task(daemon.serve())
    async with httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as http:
        await http.get("/")  # it serves
        yield Running(engines[0], client, task, http, text, manager, ready, refusals, hard_exits, near_misses)
        await asyncio.wait_for(task, 10)


async def test_it_serves_announces_readiness_once_and_ends_cleanly_on_a_signal() -> None:
    async with running_daemon() as running:
        assert (await running.http.get("/")).json() == "ready"
        assert len(running.ready) == 1
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running.task is ExitCode.OK
    assert running.engine.shutdown_timeouts == [5.0]
    assert running.hard_exits == []
    assert "Stopping; once more stops at once.\n" in running.text.getvalue()
    assert "STOPPING=1\nSTATUS=Stopping" in running.manager.told
    with pytest.raises(httpx.ConnectError):
        async with httpx.AsyncClient(trust_env=False) as other:
            await other.get(running.http.base_url)


async def test_signals_are_whose_they_were_before_once_it_has_ended() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    async with running_daemon():
        os.kill(os.getpid(), signal.SIGTERM)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_while_an_answer_is_finished_newcomers_are_refused_and_probes_answered(number: int) -> None:
    async with running_daemon() as running:
        answer = await running.begin_stream()
        running.engine.step(output("do"))
        os.kill(os.getpid(), number)
        await asyncio.sleep(0)
        refused = await running.http.get(STREAM)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert (refused.headers["connection"], refused.headers["retry-after"]) == ("close", "2")
        assert (await running.http.get("/")).json() == "ready", "whoever asks about the server is answered to the end"
        running.engine.step(output("ne", FinishReason.LENGTH))
        assert (await answer).text == "done"
        assert await running.task is ExitCode.OK
    assert "Stopping when 1 request has ended, or in 30 s; once more stops at once." in running.text.getvalue()


@asynccontextmanager
async def half_a_request(running: Running) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A connection over which the first half of a body has come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", running.http.base_url.port)
    writer.write(f"POST {STREAM} HTTP/1.1\r\nHost: h\r\nContent-Length: 8\r\nExpect: 100-continue\r\n\r\n".encode())
    assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100"), "its body is waited for"
    writer.write(b"half")
    try:
        yield reader, writer
    finally:
        writer.close()


async def test_a_body_that_does_not_come_holds_nothing_up_and_its_sender_is_told() -> None:
    async with running_daemon() as running, half_a_request(running) as (reader, _):
        started = asyncio.get_running_loop().time()
        os.kill(os.getpid(), signal.SIGTERM)
        reply = await reader.read()
        assert await running.task is ExitCode.OK
        assert asyncio.get_running_loop().time() - started < 1.5, "nobody waits for it"
    assert reply.startswith(b"HTTP/1.1 503") and b"connection: close" in reply.lower() and b'"draining"' in reply


async def test_a_body_that_comes_while_an_answer_is_finished_is_refused_at_once() -> None:
    async with running_daemon() as running, half_a_request(running) as (reader, writer):
        answer = await running.begin_stream()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0)
        writer.write(b"half")
        reply = await reader.read()
        assert reply.startswith(b"HTTP/1.1 503") and b'"draining"' in reply and not answer.done()
        running.engine.step(output("done", FinishReason.LENGTH))
        assert (await answer).text == "done"
        assert await running.task is ExitCode.OK


async def test_an_answer_that_takes_too_long_is_told_why_it_ends() -> None:
    async with running_daemon(drain_timeout_s=0.0) as running:
        answer = await running.begin_stream()
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await answer).text == "error: The server is shutting down; ask again."
        assert await running.task is ExitCode.OK
    assert running.engine.aborts == [["r"]]


async def test_a_client_that_does_not_read_is_cut_in_the_end_and_nobody_writes_a_traceback(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("server.lifecycle.daemon._FLUSH_S", 0.1)
    async with running_daemon(drain_timeout_s=0.1) as running:
        loop = asyncio.get_running_loop()
        with socket.socket() as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.setblocking(False)
            await loop.sock_connect(deaf, ("127.0.0.1", running.http.base_url.port))
            await loop.sock_sendall(deaf, f"GET {STREAM} HTTP/1.1\r\nHost: h\r\n\r\n".encode())
            await running.engine.got_request.wait()
            for _ in range(12):
                running.engine.step(output("x" * 100_000))
                await asyncio.sleep(0)
            os.kill(os.getpid(), signal.SIGTERM)
            assert await running.task is ExitCode.OK
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert running.client.num_live == 0


async def test_a_request_that_the_app_never_saw_is_told_to_whoever_counts() -> None:
    async with running_daemon() as running:
        reply = await running.http.get("/", headers={"X": "x" * 100_000})
        assert (reply.status_code, running.refusals) == (431, [431])
        os.kill(os.getpid(), signal.SIGTERM)


async def test_a_second_signal_stops_at_once() -> None:
    async with running_daemon() as running:
        answer = await running.begin_stream()
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0)
        os.kill(os.getpid(), signal.SIGTERM)
        running.engine.step(output("done", FinishReason.LENGTH))  # for here nothing ends at once
        await answer
        await running.task
    assert running.hard_exits == [ExitCode.INTERRUPTED]


async def test_the_engines_death_tells_streams_shows_in_health_and_fails_the_process(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running_daemon(linger_s=0.3) as running:
        answer = await running.begin_stream()
        running.engine.step(output("so far "))
        running.engine.die("a step failed")
        assert (await answer).text == "so far error: a step failed"
        assert (await running.http.get("/")).json() == "dead"
        assert await running.task is ExitCode.ENGINE_DIED
    assert "The engine has died: a step failed" in caplog.text


async def test_an_engine_that_dies_while_it_drains_is_no_clean_end() -> None:
    async with running_daemon() as running:
        answer = await running.begin_stream()
        os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.sleep(0)
        running.engine.die("a step failed")
        assert (await answer).text == "error: a step failed"
        assert await running.task is ExitCode.ENGINE_DIED


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (EngineFailure.MEMORY, ExitCode.OUT_OF_MEMORY),
        (EngineFailure.CHECKPOINT, ExitCode.BAD_MODEL),
        (EngineFailure.CONFIG, ExitCode.USAGE),
        (EngineFailure.FAULT, ExitCode.ENGINE_DIED),
    ],
)
async def test_a_model_that_cannot_be_loaded_ends_the_process_with_its_sentence(
    failure: EngineFailure, code: ExitCode, caplog: pytest.LogCaptureFixture
) -> None:
    async with running_daemon(linger_s=60.0, loads=False) as running:
        assert "Loading  50%  weights" in running.text.getvalue()
        assert "STATUS=Loading 50% weights" in running.manager.told
        running.engine.die("2 GiB are free, 3 GiB are needed", failure)
        assert await running.task is code
    assert "The model cannot be loaded: 2 GiB are free" in caplog.text
    assert running.ready == []


async def test_a_signal_during_loading_does_not_wait_for_it() -> None:
    async with running_daemon(loads=False) as running:
        os.kill(os.getpid(), signal.SIGINT)
        assert await running.task is ExitCode.OK
    assert running.engine.shutdown_timeouts == [0.0]


async def test_a_model_that_is_loaded_just_after_the_signal_is_not_announced(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_daemon(loads=False) as running:

        def shut_down(timeout_s: float) -> bool:
            running.engine.set_state(READY)
            return True

        monkeypatch.setattr(running.engine, "shutdown", shut_down)
        os.kill(os.getpid(), signal.SIGINT)
        assert await running.task is ExitCode.OK
    assert running.ready == []


# ---------------------------------------------------------------------- standstill
@pytest.fixture
def stacks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Filled where the real thing would write every thread's stack to standard error."""
    dumped: list[str] = []
    monkeypatch.setattr("server.lifecycle.daemon.dump_stacks", lambda: dumped.append("stacks"))
    return dumped


@pytest.mark.parametrize("is_draining", [False, True])
async def test_a_stuck_step_tells_streams_and_newcomers_and_fails_the_process(
    stacks: list[str], is_draining: bool
) -> None:
    async with running_daemon(watchdog_timeout_s=0.3) as running:
        running.engine.heartbeat_age_s = 0.0
        answer = await running.begin_stream()
        running.engine.step(output("so far "))
        if is_draining:
            os.kill(os.getpid(), signal.SIGTERM)
        running.engine.heartbeat_age_s = 1e9
        assert (await answer).text.startswith(
            "so far error: A step of the engine has not come to an end for 0."
        )  # and so many tenths
        assert await running.task is ExitCode.STUCK
    assert running.engine.shutdown_timeouts == [0.0], "it is not waited for"
    assert running.near_misses == ["near"]
    assert stacks == ["stacks"] * 2


async def test_loading_is_no_standstill(stacks: list[str]) -> None:
    async with running_daemon(watchdog_timeout_s=0.1, loads=False) as running:
        running.engine.heartbeat_age_s = 1e9
        await asyncio.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running.task is ExitCode.OK
    assert stacks == []


async def test_the_service_manager_is_fed_while_all_is_well() -> None:
    async with running_daemon(watchdog_timeout_s=1.0) as running:
        running.engine.heartbeat_age_s = 0.0
        while "WATCHDOG=1" not in running.manager.told:  # noqa: ASYNC110 - a thread tells it
            await asyncio.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("ends_in_time", [True, False])
def test_the_process_ends_at_once_where_a_thread_of_the_engine_is_left_even_if_it_is_dead(ends_in_time: bool) -> None:
    class DyingEngine(FakeEngine):
        """Dies while it loads; a step of it may still run."""

        def start(self) -> None:
            self.ends_in_time = ends_in_time
            self.die("a step failed")

    client, drain = create_client(DyingEngine), Drain()
    hard_exits: list[int] = []
    daemon = Daemon(
        client=client,
        app=create_app(client),
        drain=drain,
        sock=bind("127.0.0.1", 0),
        report=StartupReport(io.StringIO()),
        hooks=DaemonHooks(on_ready=lambda state: None, on_refusal=lambda status: None, on_near_miss=lambda: None),
        settings=DaemonSettings(),
        hard_exit=hard_exits.append,
    )
    assert daemon.run() == ExitCode.ENGINE_DIED
    assert hard_exits == ([] if ends_in_time else [ExitCode.ENGINE_DIED])
