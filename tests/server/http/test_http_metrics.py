from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from starlette.types import Message, Receive, Scope, Send

from server.http.http_metrics import HttpMetricsMiddleware
from server.http.limits import BodyLimitMiddleware
from tests.server.fake_engine_client import FakeEngineClient
from tests.server.http_helpers import build_app, connect, list_routes


class FakeHttpMetrics:
    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str, float]] = []

    def record_http(self, *, method: str, status: str, handler: str, duration_s: float) -> None:
        self.seen.append((method, status, handler, duration_s))

    @property
    def labels(self) -> list[tuple[str, str, str]]:
        return [seen[:3] for seen in self.seen]


class TickingClock:
    """A second passes each time somebody looks."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def wrap(app: FastAPI) -> FakeHttpMetrics:
    metrics = FakeHttpMetrics()
    app.add_middleware(HttpMetricsMiddleware, metrics=metrics, clock=TickingClock())
    return metrics


@pytest.mark.parametrize(
    ("method", "path", "labels"),
    [
        ("GET", "/v1/models", ("GET", "2xx", "/v1/models")),
        ("GET", "/v1/models/some/name", ("GET", "4xx", "/v1/models/{model_id:path}")),
        ("GET", "/v1/models?limit=3", ("GET", "2xx", "/v1/models")),
        ("POST", "/v1/completions", ("POST", "4xx", "/v1/completions")),
        ("DELETE", "/v1/completions", ("DELETE", "4xx", "/v1/completions")),
        ("GET", "/no/such/page", ("GET", "4xx", "other")),
        ("BREW", "/v1/models", ("other", "4xx", "/v1/models")),
    ],
)
async def test_a_request_is_counted_by_its_route_never_by_what_the_client_wrote(
    method: str, path: str, labels: tuple[str, str, str]
) -> None:
    app = build_app(FakeEngineClient())
    metrics = wrap(app)
    async with connect(app) as client:
        await client.request(method, path, json={})
    assert metrics.seen == [(*labels, 1.0)]


# Whatever else an app answers is somebody's request.
PROBES = {
    *("/health", "/ready", "/readyz", "/ping", "/version", "/metrics"),
    *("/load", "/get_load", "/is_sleeping", "/get_server_info", "/server_info", "/model_info", "/get_model_info"),
}
# A page that is looked at for hours, and the address that leads to it.
STATUS = {"/", "/status", "/status.json", "/status/events"}


def test_the_routes_of_the_app_are_found() -> None:
    paths = {route.path for route in list_routes(build_app(FakeEngineClient()))}
    assert paths >= PROBES | STATUS | {"/v1/chat/completions", "/v1/models", "/tokenize", "/docs", "/openapi.json"}


@pytest.mark.parametrize("path", sorted({route.path for route in list_routes(build_app(FakeEngineClient()))}))
async def test_every_route_is_counted_but_the_probes_and_the_status_page(path: str) -> None:
    app = build_app(FakeEngineClient())
    app.state.status_feed.close()  # else its stream would never end
    metrics = wrap(app)
    async with connect(app) as client:
        for method in ("GET", "HEAD", "POST", "DELETE"):
            await client.request(method, path, json={})
    assert len(metrics.seen) == (0 if path in PROBES | STATUS else 4)


async def test_random_paths_make_one_series() -> None:
    app = build_app(FakeEngineClient())
    metrics = wrap(app)
    async with connect(app) as client:
        for i in range(20):
            await client.get(f"/{i}/wp-login.php")
    assert set(metrics.labels) == {("GET", "4xx", "other")}


async def test_what_the_layers_below_refuse_is_counted() -> None:
    app = FastAPI()
    app.add_middleware(BodyLimitMiddleware, max_bytes=3)
    metrics = wrap(app)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as client:
        assert (await client.post("/", content=b"four")).status_code == 413
    assert metrics.labels == [("POST", "4xx", "other")]


async def call(app: Any, scope: dict[str, Any], receive: Receive) -> list[Message]:
    """Call an ASGI application; return what it sent."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent


SCOPE = {"type": "http", "method": "GET", "path": "/stream", "headers": []}


async def test_receive_and_send_pass_through_untouched_so_that_a_disconnect_is_seen() -> None:
    heard: list[Message] = []

    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"x", "more_body": True})
        heard.append(await receive())

    async def leave() -> Message:
        return {"type": "http.disconnect"}

    metrics = FakeHttpMetrics()
    sent = await call(HttpMetricsMiddleware(stream, metrics, TickingClock()), dict(SCOPE), leave)
    assert heard == [{"type": "http.disconnect"}]
    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"]
    assert metrics.seen == [("GET", "2xx", "other", 1.0)]


@pytest.mark.parametrize("error", [RuntimeError("a bug"), asyncio.CancelledError()])
async def test_an_answer_that_never_began_is_a_5xx_and_the_error_goes_on(error: BaseException) -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise error

    metrics = FakeHttpMetrics()
    with pytest.raises(type(error)):
        await call(HttpMetricsMiddleware(fail, metrics), dict(SCOPE), asyncio.Event().wait)  # type: ignore[arg-type]
    assert metrics.labels == [("GET", "5xx", "other")]


async def test_what_is_not_http_passes() -> None:
    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "lifespan.startup.complete"})

    metrics = FakeHttpMetrics()
    sent = await call(HttpMetricsMiddleware(answer, metrics), {"type": "lifespan"}, asyncio.Event().wait)  # type: ignore[arg-type]
    assert sent == [{"type": "lifespan.startup.complete"}]
    assert metrics.seen == []
