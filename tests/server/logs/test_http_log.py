from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from engine_core import EngineDeadError, FinishReason
from server.generation import GENERATING_PATHS, GenerationOutput
from server.logs.http_log import HttpLogMiddleware
from server.logs.http_record import HttpRecord
from server.logs.request_log import RequestEnd, RequestLog
from server.principal import Principal, set_principal
from server.streaming import StreamTiming
from tests.server.fake_engine_client import FakeEngineClient, say
from tests.server.http_helpers import MODEL, build_app, connect, get_events, list_routes
from tests.server.scheduled_app import ScheduledApp

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TRACE = "0af7651916cd43dd8448eb211c80319c"


class Log:
    """What the log tells of requests, by the names of the fields."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog

    @property
    def lines(self) -> list[Mapping[str, Any]]:
        found = [
            each for each in self._caplog.records if each.name == "server.requests" and each.levelno >= logging.INFO
        ]
        return [each.msg.fields for each in found if isinstance(each.msg, RequestEnd)]

    def read(self, *names: str) -> list[Any]:
        """The fields of the only line."""
        (line,) = self.lines
        return [line[name] for name in names]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    caplog.set_level(logging.INFO)
    return Log(caplog)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body"), [(COMPLETIONS, {"prompt": "abc"}), (CHAT, {"messages": [{"role": "user", "content": "abc"}]})]
)
async def test_an_answer_has_one_line_with_its_figures(path: str, body: dict[str, Any], stream: bool, log: Log) -> None:
    headers = {"X-Request-Id": "my-id", "traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    engine = FakeEngineClient(lambda request: say("a", "b", "c", num_cached_tokens=2))
    async with connect(build_app(engine)) as client:
        response = await client.post(path, json={**body, "stream": stream}, headers=headers)
    assert response.status_code == 200
    num_input = len(engine.requests[0].engine_request.prompt_token_ids)
    assert log.read("method", "path", "status", "stream", "model", "n") == ["POST", path, 200, stream, MODEL, 1]
    assert log.read("input_tokens", "cached_tokens", "output_tokens", "finish_reason") == [num_input, 2, 3, "stop"]
    assert log.read("x_request_id", "trace_id", "key_id", "error_code") == ["my-id", TRACE, None, None]
    (request_id,) = log.read("request_id")
    assert request_id in response.text


async def test_who_sends_no_label_has_the_one_that_the_server_made(log: Log) -> None:
    async with connect(build_app(FakeEngineClient())) as client:
        response = await client.post(COMPLETIONS, json={"prompt": "a"})
    assert log.read("x_request_id", "trace_id") == [response.headers["x-request-id"], None]


async def test_all_choices_of_all_prompts_are_one_line(log: Log) -> None:
    async with connect(build_app(FakeEngineClient())) as client:
        usage = (await client.post(COMPLETIONS, json={"prompt": ["ab", "c"], "n": 3})).json()["usage"]
    counts = [usage["prompt_tokens"], usage["completion_tokens"]]
    assert log.read("n", "input_tokens", "output_tokens") == [6, *counts]


@pytest.mark.parametrize(
    ("content", "headers", "status", "code", "param"),
    [
        (b"{", {}, 400, "malformed_body", None),
        (b'{"prompt": "a", "n": 0}', {}, 400, "invalid_value", "n"),
        (b'{"prompt": "a", "model": "other"}', {}, 404, "model_not_found", "model"),
        (b"{}", {"Content-Type": "text/plain"}, 415, "unsupported_media_type", None),
        (b"{}", {"Content-Length": "99999999"}, 413, "body_too_large", None),
    ],
)
async def test_what_is_refused_has_a_line_wherever_that_happens(
    content: bytes, headers: dict[str, str], status: int, code: str, param: str | None, log: Log
) -> None:
    async with connect(build_app(FakeEngineClient())) as client:
        sent = {"Content-Type": "application/json", "X-Request-Id": "refused", **headers}
        response = await client.post(COMPLETIONS, content=content, headers=sent)
    assert response.status_code == status
    assert log.read("status", "error_code", "error_param", "x_request_id") == [status, code, param, "refused"]
    assert log.read("request_id", "n", "input_tokens", "finish_reason") == [None, None, 0, None]


async def test_a_method_that_is_not_taken_has_a_line(log: Log) -> None:
    async with connect(build_app(FakeEngineClient())) as client:
        await client.delete(CHAT)
    assert log.read("method", "status", "error_code") == ["DELETE", 405, "method_not_allowed"]


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_answer_and_one_amid_it_are_told_alike(stream: bool, log: Log) -> None:
    failed = GenerationOutput("", 1, FinishReason.ERROR, error="It failed.")
    engine = FakeEngineClient(lambda request: [*say("a", "b")[:1], failed])
    async with connect(build_app(engine)) as client:
        response = await client.post(COMPLETIONS, json={"prompt": "a", "stream": stream})
        assert "internal_error" in response.text
    assert log.read("status", "error_code", "finish_reason") == [200 if stream else 500, "internal_error", "error"]


async def test_an_engine_that_dies_amid_a_stream_is_told(log: Log) -> None:
    engine = FakeEngineClient(lambda request: [*say("a", "b")[:1], EngineDeadError("gone")])
    async with connect(build_app(engine)) as client:
        response = await client.post(COMPLETIONS, json={"prompt": "a", "stream": True})
        assert (await get_events(response))[-1] == "[DONE]"
    assert log.read("status", "error_code") == [200, "engine_dead"]


async def test_probes_and_other_paths_have_no_line(log: Log) -> None:
    async with connect(build_app(FakeEngineClient())) as client:
        for path in ("/health", "/ready", "/metrics", "/load", "/v1/models", "/nothing"):
            await client.get(path)
        await client.post("/tokenize", json={"prompt": "a"})
    assert log.lines == []


async def test_other_paths_have_a_line_for_whoever_debugs(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, logger="server.requests"):
        async with connect(build_app(FakeEngineClient())) as client:
            await client.get("/health")
            await client.get("/v1/models?api_key=secret")
    (message,) = [each.getMessage() for each in caplog.records if each.name == "server.requests"]
    assert message.startswith("GET /v1/models 200 ended; total ")


def test_the_paths_are_those_of_the_generating_endpoints() -> None:
    routes = list_routes(build_app(FakeEngineClient()))
    assert {route.path for route in routes if "generation" in getattr(route, "tags", [])} == set(GENERATING_PATHS)


# ---------------------------------------------------------------------- over the real scheduler
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_amid_its_answer_is_seen_to(stream: bool, log: Log) -> None:
    server = ScheduledApp()
    caller = await server.ask(max_tokens=50, stream=stream)
    await server.step(5)
    caller.leave()
    await server.finish(caller)
    assert log.read("finish_reason", "client_disconnected") == ["abort", True]
    assert log.read("status") == [200 if stream else 499]
    (num_output,) = log.read("output_tokens")
    assert 0 < num_output < 50


async def test_a_client_that_leaves_before_its_streams_head_is_no_failure_of_ours(log: Log) -> None:
    server = ScheduledApp()
    caller = await server.ask(max_tokens=50, stream=True)
    caller.leave()
    await caller.task
    assert log.read("status", "client_disconnected", "output_tokens", "ttft_s") == [499, True, 0, None]
    page = server.metrics.render()[0].decode()
    assert 'status="4xx"' in page and 'status="5xx"' not in page


async def test_times_are_in_order(log: Log) -> None:
    server = ScheduledApp()
    await server.finish(await server.ask(max_tokens=20, n=2))
    queue_s, ttft_s, itl_s, e2e_s = log.read("queue_s", "ttft_s", "itl_p50_s", "e2e_s")
    assert 0 <= queue_s <= ttft_s <= e2e_s
    assert 0 < itl_s < e2e_s


async def test_a_request_that_lost_its_blocks_says_how_often(log: Log) -> None:
    server = ScheduledApp(num_blocks=8, max_num_seqs=4)
    callers = [await server.ask(prompt=letter * 6, max_tokens=20) for letter in "abc"]
    await server.finish(*callers)
    counted = [line for line in server.metrics.render()[0].decode().splitlines() if "num_preemptions_total{" in line]
    assert sum(line["preemptions"] for line in log.lines) == float(counted[0].rsplit(" ", 1)[1]) > 0


# ---------------------------------------------------------------------- the middleware alone
class SpyingLog(RequestLog):
    def __init__(self) -> None:
        super().__init__()
        self.ended: list[HttpRecord] = []

    def end(self, record: HttpRecord) -> None:
        self.ended.append(record)


SCOPE = {"type": "http", "method": "POST", "path": COMPLETIONS, "headers": []}


async def call(app: Any, spy: RequestLog, clock: Any = lambda: 5.0) -> list[Message]:
    """Call an application through the middleware; return what it sent."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    await HttpLogMiddleware(app, spy, clock)(dict(SCOPE), receive, send)
    return sent


async def test_it_changes_nothing_and_tells_who_sends_and_how_long_it_took() -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        set_principal(scope, Principal("team-a", frozenset()))
        assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.start", "status": 204, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    spy, times = SpyingLog(), iter((10.0, 12.5))
    sent = await call(answer, spy, lambda: next(times))
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    (record,) = spy.ended
    assert (record.key_id, record.status, record.start_time, record.end_time) == ("team-a", 204, 10.0, 12.5)


@pytest.mark.parametrize(
    ("error", "code"), [(RuntimeError("a bug"), "internal_error"), (asyncio.CancelledError(), "cancelled")]
)
async def test_what_nobody_caught_goes_on_and_is_told(error: BaseException, code: str) -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    spy = SpyingLog()
    with pytest.raises(type(error)):
        await call(fail, spy)
    (record,) = spy.ended
    assert (record.status, record.error and record.error.code) == (500, code)


async def test_what_is_not_http_passes() -> None:
    seen: list[str] = []

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope["type"])

    spy = SpyingLog()
    await HttpLogMiddleware(answer, spy)({"type": "lifespan"}, asyncio.Event().wait, asyncio.Event().wait)  # type: ignore[arg-type]
    assert (seen, spy.ended) == (["lifespan"], [])


async def test_a_log_that_fails_costs_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    class Broken:
        def record(self, record: HttpRecord) -> str:
            raise ZeroDivisionError

        def close(self) -> None:
            """Nothing is open."""

    app: FastAPI = build_app(FakeEngineClient(), request_log=RequestLog(Broken()), timing=StreamTiming())
    async with connect(app) as client:
        response: httpx.Response = await client.post(COMPLETIONS, json={"prompt": "a"})
    assert response.status_code == 200
    assert any("could not be told" in each.getMessage() for each in caplog.records)
