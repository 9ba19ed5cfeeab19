import asyncio
import io
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from starlette.types import Receive, Scope, Send

from engine_core import EngineDeadError, EnginePhase, EngineState, FinishReason
from server.daemon import Daemon
from server.errors import ServerStoppingError
from server.exit_codes import ExitCode
from server.in_proc_client import InProcEngineClient
from server.listener import bind, listen
from server.metrics import ServerMetrics
from server.output_processor import OutputProcessor
from server.startup_report import StartupReport
from tests.server.fake_engine import READY, CharDecodeStream, FakeEngine, char_bytes, create_request, output


@dataclass
class Running:
    """A daemon serving on a free port, over an engine that the test drives."""

    engine: FakeEngine
    client: InProcEngineClient
    task: asyncio.Task[ExitCode]
    http: httpx.AsyncClient
    text: io.StringIO
    ready: list[EngineState] = field(default_factory=list)
    refusals: list[int] = field(default_factory=list)
    hard_exits: list[int] = field(default_factory=list)


def create_app(client: InProcEngineClient) -> Callable[..., Any]:
    """/stream runs one request; everything else tells the engine's phase."""

    async def stream() -> AsyncIterator[bytes]:
        try:
            async for part in client.generate(create_request()):
                yield part.text.encode()
        except (EngineDeadError, ServerStoppingError) as error:
            yield f"error: {error}".encode()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for phase in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{phase}.complete"})
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/stream":
            async for piece in stream():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "http.response.body", "body": json.dumps(client.state.phase).encode()})

    return app


@asynccontextmanager
async def running_daemon(linger_s: float = 0.0, loads: bool = True) -> AsyncIterator[Running]:
    engines: list[FakeEngine] = []

    def create_engine(*callbacks: Any) -> FakeEngine:
        engine = FakeEngine(*callbacks)
        if not loads:
            engine.start = lambda: engine.set_state(EngineState(EnginePhase.LOADING, "weights", 0.5))  # type: ignore[method-assign]
        engines.append(engine)
        return engine

    processor = OutputProcessor(
        new_decode_stream=CharDecodeStream, token_bytes=char_bytes, metrics=ServerMetrics("tiny")
    )
    client = InProcEngineClient(create_engine, processor)
    sock, text = bind("127.0.0.1", 0), io.StringIO()
    ready, refusals, hard_exits = list[EngineState](), list[int](), list[int]()
    listen(sock)
    url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    daemon = Daemon(
        client=client,
        app=create_app(client),
        sock=sock,
        report=StartupReport(text),
        on_ready=ready.append,
        on_refusal=refusals.append,
        linger_s=linger_s,
        hard_exit=hard_exits.append,
    )
    task = asyncio.create_task(daemon.serve())
    async with httpx.AsyncClient(base_url=url, timeout=10, trust_env=False) as http:
        await http.get("/")  # it serves
        yield Running(engines[0], client, task, http, text, ready, refusals, hard_exits)
        await asyncio.wait_for(task, 10)


async def test_it_serves_announces_readiness_once_and_ends_cleanly_on_a_signal() -> None:
    async with running_daemon() as running:
        assert (await running.http.get("/")).json() == "ready"
        assert len(running.ready) == 1
        os.kill(os.getpid(), signal.SIGTERM)
        assert await running.task is ExitCode.OK
    assert running.engine.shutdown_timeouts == [5.0]
    assert running.hard_exits == []
    with pytest.raises(httpx.ConnectError):
        async with httpx.AsyncClient(trust_env=False) as other:
            await other.get(running.http.base_url)


async def test_an_answer_in_flight_is_finished_after_the_signal() -> None:
    async with running_daemon() as running:
        answer = asyncio.create_task(running.http.get("/stream"))
        await running.engine.got_request.wait()
        os.kill(os.getpid(), signal.SIGINT)
        running.engine.step(output("done", FinishReason.LENGTH))
        assert (await answer).text == "done"
        assert await running.task is ExitCode.OK


async def test_an_answer_that_takes_too_long_is_told_why_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.daemon._FINISH_S", 0.0)
    async with running_daemon() as running:
        answer = asyncio.create_task(running.http.get("/stream"))
        await running.engine.got_request.wait()
        os.kill(os.getpid(), signal.SIGTERM)
        assert (await answer).text == "error: The server is shutting down; ask again."
        assert await running.task is ExitCode.OK
    assert running.engine.aborts == [["r"]]


async def test_a_request_that_the_app_never_saw_is_told_to_whoever_counts() -> None:
    async with running_daemon() as running:
        reply = await running.http.get("/", headers={"X": "x" * 100_000})
        assert (reply.status_code, running.refusals) == (431, [431])
        os.kill(os.getpid(), signal.SIGTERM)


async def test_a_second_signal_stops_at_once() -> None:
    async with running_daemon() as running:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        await running.task
    assert running.hard_exits == [ExitCode.INTERRUPTED]


async def test_the_engines_death_tells_streams_shows_in_health_and_fails_the_process() -> None:
    async with running_daemon(linger_s=0.3) as running:
        answer = asyncio.create_task(running.http.get("/stream"))
        await running.engine.got_request.wait()
        running.engine.step(output("so far "))
        running.engine.die("a step failed")
        assert (await answer).text == "so far error: a step failed"
        assert (await running.http.get("/")).json() == "dead"
        assert await running.task is ExitCode.ENGINE_DIED
    assert "The engine has died: a step failed" in running.text.getvalue()


async def test_a_model_that_cannot_be_loaded_ends_the_process_with_its_sentence() -> None:
    async with running_daemon(linger_s=60.0, loads=False) as running:
        assert "Loading  50%  weights" in running.text.getvalue()
        running.engine.die("2 GiB are free, 3 GiB are needed")
        assert await running.task is ExitCode.ENGINE_DIED
    assert "The model cannot be loaded: 2 GiB are free" in running.text.getvalue()
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


@pytest.mark.parametrize("ends_in_time", [True, False])
def test_the_process_ends_at_once_where_a_thread_of_the_engine_is_left_even_if_it_is_dead(ends_in_time: bool) -> None:
    class DyingEngine(FakeEngine):
        """Dies while it loads; a step of it may still run."""

        def start(self) -> None:
            self.ends_in_time = ends_in_time
            self.die("a step failed")

    processor = OutputProcessor(new_decode_stream=CharDecodeStream, token_bytes=char_bytes, metrics=ServerMetrics("m"))
    client = InProcEngineClient(DyingEngine, processor)
    hard_exits: list[int] = []
    daemon = Daemon(
        client=client,
        app=create_app(client),
        sock=bind("127.0.0.1", 0),
        report=StartupReport(io.StringIO()),
        on_ready=lambda state: None,
        on_refusal=lambda status: None,
        hard_exit=hard_exits.append,
    )
    assert daemon.run() == ExitCode.ENGINE_DIED
    assert hard_exits == ([] if ends_in_time else [ExitCode.ENGINE_DIED])
