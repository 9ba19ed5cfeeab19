"""API keys at the door: what is open, what needs which key, and how a refusal looks, is counted and is logged."""

from __future__ import annotations

import logging
import time
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from server.access.api_keys import KeyRing, parse_api_keys
from server.access.auth import OPEN_PATHS, AuthMiddleware, required_scope
from server.access.refusals import AccessRefusals
from server.access.setup import Access
from server.principal import Principal, get_principal
from server.principal import Scope as KeyScope
from tests.server.fake_engine_client import FakeEngineClient
from tests.server.http_helpers import FakeMetrics, build_app, connect, list_routes

KEYS = "alice:user:user-key,prom:metrics:metrics-key,root:admin:admin-key,both:user+metrics:both-key"
BODY = {"prompt": "hi"}


def ring() -> KeyRing:
    return KeyRing(parse_api_keys(KEYS))


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


async def ask(
    method: str, path: str, headers: dict[str, str] | list[tuple[str, str]] | None = None, **parts: Any
) -> httpx.Response:
    metrics = parts.pop("metrics", None) or FakeMetrics()
    app = build_app(parts.pop("engine", None) or FakeEngineClient(), metrics=metrics, access=Access(keys=ring()))
    async with connect(app) as client:
        return await client.request(method, path, headers=headers, **parts)


def check_refusal(response: httpx.Response, status: int, code: str) -> dict[str, Any]:
    """The answer is OpenAI's error, with the header that RFC 6750 asks for and a request id."""
    assert response.status_code == status
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["code"]) == ("invalid_request_error", code)
    assert response.headers["www-authenticate"].startswith('Bearer realm="pointsman"')
    assert response.headers["x-request-id"]
    return error


# ---------------------------------------------------------------------- who gets in
@pytest.mark.parametrize("path", sorted({route.path for route in list_routes(build_app(FakeEngineClient()))}))
@pytest.mark.parametrize("method", ["GET", "HEAD", "POST", "OPTIONS"])
async def test_without_a_key_nothing_answers_but_what_is_open(method: str, path: str) -> None:
    response = await ask(method, path)
    assert (response.status_code == 401) == (path not in OPEN_PATHS)


@pytest.mark.parametrize("path", ["/no/such/path", "/v1", "/.env", "/health/", "/HEALTH", "/health%0A"])
async def test_paths_that_do_not_exist_need_a_key_too(path: str) -> None:
    engine = FakeEngineClient()
    check_refusal(await ask("GET", path, engine=engine), 401, "invalid_api_key")
    assert (await ask("GET", path, bearer("user-key"))).status_code in (404, 200)


async def test_the_open_paths_are_the_probes_and_pages_without_data() -> None:
    assert {"/", "/health", "/ready", "/readyz", "/ping", "/status"} == OPEN_PATHS
    for path in ("/health", "/ready", "/readyz", "/ping"):
        assert (await ask("GET", path)).status_code == 200


@pytest.mark.parametrize(
    ("key", "path", "status"),
    [
        ("user-key", "/v1/models", 200),
        ("user-key", "/version", 200),
        ("user-key", "/metrics", 403),
        ("metrics-key", "/metrics", 200),
        ("metrics-key", "/v1/models", 403),
        ("metrics-key", "/no/such/path", 403),
        ("both-key", "/v1/models", 200),
        ("both-key", "/metrics", 200),
        ("admin-key", "/v1/models", 200),
        ("admin-key", "/metrics", 200),
        ("user-key", "/admin/limits", 403),
        ("metrics-key", "/admin", 403),
        ("user-key", "/abort/cmpl-1", 403),
        ("user-key", "/reset_prefix_cache", 403),
        ("user-key", "/status/events", 403),
        ("user-key", "/status.json", 403),
        ("admin-key", "/admin/no/such", 404),
    ],
)
async def test_a_key_opens_what_its_scope_says(key: str, path: str, status: int) -> None:
    response = await ask("GET", path, bearer(key))
    assert response.status_code == status
    if status == 403:
        error = check_refusal(response, 403, "insufficient_scope")
        assert "insufficient_scope" in response.headers["www-authenticate"]
        assert "The scope of this API key is " in error["message"]
        assert "admin or admin" not in error["message"]


@pytest.mark.parametrize(
    ("path", "scope"),
    [
        ("/metrics\n", KeyScope.METRICS),
        ("/reset_prefix_cache\n", KeyScope.ADMIN),
        ("/abort\n", KeyScope.ADMIN),
        ("/admin\n", KeyScope.ADMIN),
        ("/health\n", KeyScope.USER),
        ("//health", KeyScope.USER),
        ("/health/../admin", KeyScope.USER),  # which the router does not resolve either
        ("", KeyScope.USER),
    ],
)
def test_a_line_feed_at_the_end_which_the_router_overlooks_opens_nothing(path: str, scope: KeyScope) -> None:
    assert required_scope(path) is scope


async def test_the_router_itself_takes_a_line_feed_for_nothing() -> None:
    """Else the test above would guard against nothing."""
    assert (await ask("GET", "/metrics%0A", bearer("metrics-key"))).status_code == 200
    assert (await ask("GET", "/metrics%0A", bearer("user-key"))).status_code == 403


# ---------------------------------------------------------------------- what counts as a key
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer"},
        {"Authorization": "Bearer "},
        {"Authorization": "user-key"},
        {"Authorization": "Basic dXNlci1rZXk6"},
        {"Authorization": "Token user-key"},
        {"X-Api-Key": "user-key"},
        {"Api-Key": "user-key"},
        {"Cookie": "Authorization=Bearer user-key"},
        [("Authorization", "Bearer user-key"), ("Authorization", "Bearer other")],
        [("Authorization", "Bearer other"), ("Authorization", "Bearer user-key")],
    ],
)
async def test_only_one_bearer_token_is_a_key(headers: dict[str, str] | list[tuple[str, str]]) -> None:
    metrics = FakeMetrics()
    error = check_refusal(await ask("GET", "/v1/models", headers, metrics=metrics), 401, "invalid_api_key")
    assert "Authorization: Bearer" in error["message"]
    assert metrics.refused == ["no_key"]


async def test_a_key_in_the_address_is_none() -> None:
    for query in ("key=user-key", "api_key=user-key", "access_token=user-key"):
        assert (await ask("GET", f"/v1/models?{query}")).status_code == 401


@pytest.mark.parametrize("key", ["user-key", "USER-KEY", "user-ke", "user-key2", "é", "x" * 5000])
async def test_a_key_is_compared_to_the_letter(key: str) -> None:
    response = await ask("GET", "/v1/models", {"Authorization": f"bearer  {key}".encode("latin-1")})  # type: ignore[dict-item]
    assert (response.status_code == 200) == (key == "user-key")
    if response.status_code != 200:
        error = check_refusal(response, 401, "invalid_api_key")
        assert "invalid_token" in response.headers["www-authenticate"]
        assert key not in error["message"]


# ---------------------------------------------------------------------- how it is refused
async def test_refusals_are_counted_as_requests_and_by_reason_and_no_key_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    metrics = FakeMetrics()
    app = build_app(FakeEngineClient(), metrics=metrics, access=Access(keys=ring()))
    with caplog.at_level(logging.DEBUG):
        async with connect(app) as client:
            await client.post("/v1/completions", json=BODY)
            await client.post("/v1/completions", json=BODY, headers=bearer("sk-wrong-secret"))
            await client.get("/metrics", headers=bearer("user-key"))
            await client.post("/v1/completions", json=BODY, headers=bearer("user-key"))
    assert metrics.refused == ["no_key", "unknown_key", "scope"]
    assert metrics.http == [
        ("POST", "4xx", "other"),
        ("POST", "4xx", "other"),
        ("GET", "4xx", "other"),
        ("POST", "2xx", "/v1/completions"),
    ]
    assert "requests refused: 1 without a key" in caplog.text
    assert "sk-wrong-secret" not in caplog.text and "user-key" not in caplog.text


async def test_a_refused_request_is_not_read_and_reaches_nobody() -> None:
    engine = FakeEngineClient()
    received: list[str] = []
    app = build_app(engine, access=Access(keys=ring()))

    async def receive() -> Message:
        received.append("asked")
        return {"type": "http.request", "body": b"", "more_body": True}

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "raw_path": b"/v1/completions",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"expect", b"100-continue")],
    }
    await app(scope, receive, send)
    assert sent[0]["status"] == 401
    assert received == [] and engine.requests == []


async def test_a_websocket_does_not_come_around_the_keys() -> None:
    async def never(scope: Scope, receive: Receive, send: Send) -> None:
        raise AssertionError

    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    guard = AuthMiddleware(never, ring(), AccessRefusals(FakeMetrics()))
    await guard({"type": "websocket", "path": "/", "headers": []}, never, send)  # type: ignore[arg-type]
    assert sent == [{"type": "websocket.close", "code": 1008}]


# ---------------------------------------------------------------------- who it was
async def test_the_application_hears_who_sends_a_request_and_on_open_paths_that_it_is_nobody() -> None:
    seen: list[Principal] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(get_principal(scope))

    guard = AuthMiddleware(app, ring(), AccessRefusals(FakeMetrics()))
    for path, key in (("/v1/models", b"Bearer user-key"), ("/health", b"Bearer admin-key")):
        await guard({"type": "http", "path": path, "headers": [(b"authorization", key)]}, None, None)  # type: ignore[arg-type]
    assert [principal.key_id for principal in seen] == ["alice", ""]
    assert seen[0].cache_salt and seen[0].scopes == {KeyScope.USER}
    assert seen[1].scopes == frozenset()


async def test_f9_each_keys_prefixes_are_its_own_and_the_bodys_salt_divides_them_further() -> None:
    """Field report F9: a salt that the caller writes is no barrier, so the key's comes first."""
    engine = FakeEngineClient()
    app = build_app(engine, access=Access(keys=ring()))
    bodies = ({}, {"cache_salt": "x"})
    async with connect(app) as client:
        for path, body in (
            ("/v1/completions", BODY),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
            ("/v1/completions", {**BODY, "n": 5}),  # admitted on a thread
        ):
            for key in ("user-key", "admin-key"):
                for salt in bodies:
                    reply = await client.post(path, json={**body, **salt, "max_tokens": 1}, headers=bearer(key))
                    assert reply.status_code == 200, reply.text
    salts = [request.engine_request.cache_salt for request in engine.requests]
    assert len(salts) == 4 * (1 + 1 + 5) and len(set(salts)) == 4
    assert all(salts)


async def test_what_a_key_adds_to_the_salt_is_shown_to_nobody() -> None:
    app = build_app(FakeEngineClient(), access=Access(keys=ring()))
    async with connect(app) as client:
        shown = [
            (await client.post("/v1/completions/render", json={**BODY, **salt}, headers=bearer("user-key"))).json()
            for salt in ({}, {"cache_salt": "mine"})
        ]
    assert [rendered["cache_salt"] for (rendered,) in shown] == [None, "mine"]


async def test_asking_for_a_key_takes_microseconds() -> None:
    """20 us are the budget; the bound leaves room for a machine that does other things at the same time."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        pass

    guard = AuthMiddleware(app, ring(), AccessRefusals(FakeMetrics()))
    headers = [(b"host", b"h"), (b"user-agent", b"x"), (b"authorization", b"Bearer user-key"), (b"accept", b"*/*")]
    scope = {"type": "http", "path": "/v1/chat/completions", "headers": headers}
    best_s = float("inf")
    for _ in range(5):
        started = time.perf_counter()
        for _ in range(200):
            await guard(scope, None, None)  # type: ignore[arg-type]
        best_s = min(best_s, (time.perf_counter() - started) / 200)
    assert best_s < 50e-6
