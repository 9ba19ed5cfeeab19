from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest

from server.http.limits import MAX_BODY_BYTES, MAX_LABEL_LENGTH
from tests.server.fake_engine_client import FakeEngineClient
from tests.server.http_helpers import FakeMetrics, FakeTemplate, build_app, connect, serve

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
JSON_HEADER = {"Content-Type": "application/json"}
USER = {"role": "user", "content": "hi"}


def check_error(response: httpx.Response, status: int, code: str | None = None) -> dict[str, Any]:
    """The error object of a response, checked for OpenAI's shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].endswith((".", "?"))
    assert code is None or error["code"] == code
    return error


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/v1/models/", 404, "model_not_found"),
        ("POST", "/v1/completions/", 404, "not_found"),
        ("GET", COMPLETIONS, 405, "method_not_allowed"),
        ("DELETE", "/health", 405, "method_not_allowed"),
    ],
)
async def test_the_frameworks_own_errors_have_the_usual_shape(method: str, path: str, status: int, code: str) -> None:
    async with connect(build_app(FakeEngineClient())) as client:
        response = await client.request(method, path)
    check_error(response, status, code)
    assert ("allow" in response.headers) == (status == 405)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b'"prompt"',
        b"\xff\xfe\x00",
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": NaN}',
        b'{"prompt": "a", "temperature": 1e999}',
        b'{"prompt": "a", "max_tokens": ' + b"9" * 5000 + b"}",
        b'{"prompt": "a", "temperature": ' + b"9" * 4000 + b"}",
        b'{"prompt": [' + b"9" * 4000 + b"]}",
        b'{"prompt": ' + b"[" * 50_000 + b"]" * 50_000 + b"}",
        b'{"prompt": ' + b'{"a":' * 1000 + b"1" + b"}" * 1000 + b"}",
        rb'{"prompt": "a", "model": "\ud800"}',
        rb'{"prompt": "a", "temperature": "\ud800"}',
        rb'{"prompt": "a", "stop": {"\udfff": 1}}',
        b'{"prompt": "a", "seed": 99999999999999999999999}',
        b'{"prompt": [[[1]]]}',
        b'{"prompt": "a", "n": 1e400}',
        b'{"prompt": "a", "stop": ' + json.dumps(["x"] * 1000).encode() + b"}",
        b'{"prompt": "a", "logit_bias": {"1": 101}}',
        b'{"prompt": "a", "stop_token_ids": [true]}',
        b'{"prompt": "a", "stream": true, "stream_options": [1]}',
        b'{"messages": [{}]}',
    ],
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_no_body_brings_a_5xx(path: str, body: bytes) -> None:
    async with connect(build_app(FakeEngineClient())) as client:
        response = await client.post(path, content=body, headers=JSON_HEADER)
    check_error(response, 404 if b'"model"' in body and path == COMPLETIONS else 400)


@pytest.mark.parametrize(
    "messages",
    [None, [], {}, "hi", [None], [[]], [{"role": "boss", "content": "x"}], [{"role": 5, "content": "x"}], [USER, USER]],
)
async def test_bad_messages_are_400_with_param(messages: Any) -> None:
    async with connect(build_app(FakeEngineClient())) as client:
        response = await client.post(CHAT, json={"messages": messages})
    error = check_error(response, 400)
    assert error["param"].startswith("messages")


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", ""])
async def test_other_content_types_are_refused(content_type: str) -> None:
    async with connect(build_app(FakeEngineClient())) as client:
        response = await client.post(COMPLETIONS, content=b'{"prompt":"a"}', headers={"Content-Type": content_type})
    check_error(response, 415, "unsupported_media_type")


@pytest.mark.parametrize("content_type", [None, "application/json; charset=utf-8", "application/vnd.api+json"])
async def test_json_content_types_are_taken(content_type: str | None) -> None:
    headers = {} if content_type is None else {"Content-Type": content_type}
    async with connect(build_app(FakeEngineClient())) as client:
        response = await client.post(COMPLETIONS, content=b'{"prompt":"a"}', headers=headers)
    assert response.status_code == 200


async def test_a_compressed_body_is_refused_as_such_and_an_uncompressed_one_taken() -> None:
    async with connect(build_app(FakeEngineClient())) as client:
        gzip, identity = [
            await client.post(
                COMPLETIONS, content=b'{"prompt":"a"}', headers={**JSON_HEADER, "Content-Encoding": coding}
            )
            for coding in ("gzip", "identity")
        ]
    assert "uncompressed" in check_error(gzip, 415, "unsupported_media_type")["message"]
    assert identity.status_code == 200


async def test_a_lone_surrogate_reaches_the_model_as_a_replacement_character() -> None:
    engine = FakeEngineClient()
    async with connect(build_app(engine)) as client:
        response = await client.post(COMPLETIONS, content=rb'{"prompt":"a\ud83d"}', headers=JSON_HEADER)
    assert response.status_code == 200
    assert engine.requests[0].engine_request.prompt_token_ids == [1, ord("a"), 0xFFFD % 1000]


async def send_chunks(num_bytes: int) -> AsyncIterator[bytes]:
    for _ in range(num_bytes // 65536 + 1):
        yield b" " * 65536


async def test_a_body_over_the_limit_is_refused_announced_or_not() -> None:
    async with connect(build_app(FakeEngineClient())) as client:
        announced = await client.post(COMPLETIONS, content=b" " * (MAX_BODY_BYTES + 1), headers=JSON_HEADER)
        chunked = await client.post(COMPLETIONS, content=send_chunks(MAX_BODY_BYTES), headers=JSON_HEADER)
        largest = await client.post(COMPLETIONS, content=b" " * MAX_BODY_BYTES, headers=JSON_HEADER)
    check_error(announced, 413, "body_too_large")
    check_error(chunked, 413, "body_too_large")
    check_error(largest, 400, "malformed_body")


async def test_the_limit_holds_over_a_socket_and_closes_the_connection() -> None:
    async with serve(build_app(FakeEngineClient())) as url, httpx.AsyncClient(base_url=url) as client:
        chunked = await client.post(COMPLETIONS, content=send_chunks(MAX_BODY_BYTES), headers=JSON_HEADER)
        assert (await client.get("/health")).status_code == 200
    check_error(chunked, 413, "body_too_large")
    assert chunked.headers["connection"] == "close"


@pytest.mark.parametrize(
    ("sent", "echoed"),
    [("abc-1.2:3/4", "abc-1.2:3/4"), ("a b\tc", "abc"), ("é<script>", "script"), ("x" * 5000, "x" * MAX_LABEL_LENGTH)],
)
async def test_a_clients_request_id_is_echoed_clean_and_short(sent: str, echoed: str) -> None:
    async with connect(build_app(FakeEngineClient())) as client:
        response = await client.get("/health", headers={"X-Request-Id": sent.encode("latin-1", "ignore")})  # type: ignore[dict-item]
    assert response.headers["x-request-id"] == echoed


async def test_equal_request_ids_never_meet_inside() -> None:
    engine = FakeEngineClient()
    async with connect(build_app(engine)) as client:
        for _ in range(2):
            await client.post(COMPLETIONS, json={"prompt": "a"}, headers={"X-Request-Id": "same"})
        nameless = [(await client.get("/health")).headers["x-request-id"] for _ in range(2)]
    assert len({request.engine_request.request_id for request in engine.requests}) == 2
    assert len(set(nameless)) == 2


async def test_unknown_fields_are_counted_each_time_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    metrics = FakeMetrics()
    with caplog.at_level(logging.WARNING, logger="server.request_reader"):
        async with connect(build_app(FakeEngineClient(), metrics=metrics)) as client:
            for _ in range(2):
                response = await client.post(COMPLETIONS, json={"prompt": "a", "max_token": 5})
                assert response.status_code == 200
    assert metrics.unknown == ["max_token", "max_token"]
    assert sum("max_token" in record.getMessage() for record in caplog.records) == 1


async def test_strict_mode_refuses_unknown_fields() -> None:
    metrics = FakeMetrics()
    async with connect(build_app(FakeEngineClient(), metrics=metrics, is_strict=True)) as client:
        response = await client.post(CHAT, json={"messages": [USER], "max_completion_token": 5})
    error = check_error(response, 400, "unknown_parameter")
    assert error["param"] == "max_completion_token"
    assert "`max_completion_tokens`" in error["message"]
    assert metrics.unknown == []


async def test_an_unforeseen_error_is_a_500_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeTemplate):
        def render(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
            raise ZeroDivisionError("inside /secret")

    with caplog.at_level(logging.ERROR):
        async with connect(build_app(FakeEngineClient(), template=Broken())) as client:
            response = await client.post(CHAT, json={"messages": [USER]})
    check_error(response, 500, "internal_error")
    assert "secret" not in response.text
    assert "Traceback" not in response.text
    assert any(record.exc_info for record in caplog.records)


async def test_health_answers_while_the_largest_body_is_read() -> None:
    # The promise is 250 ms; the bound leaves room for a machine that does other things at the same time.
    text = json.dumps({"prompt": "", "user": "a, [\n" * (MAX_BODY_BYTES // 6 - 10)}).encode()
    ids = b'{"prompt":[' + b"1," * (MAX_BODY_BYTES // 2 - 20) + b"1]}"
    loop = asyncio.get_running_loop()
    async with serve(build_app(FakeEngineClient())) as url, httpx.AsyncClient(base_url=url) as client:
        for body in (text, ids):
            post = asyncio.create_task(client.post(COMPLETIONS, content=body, headers=JSON_HEADER))
            worst_s = 0.0
            while not post.done():
                start_s = loop.time()
                assert (await client.get("/health")).status_code == 200
                worst_s = max(worst_s, loop.time() - start_s)
            check_error(post.result(), 400)
            assert worst_s < 1.0


async def test_the_openapi_document_describes_the_bodies() -> None:
    async with connect(build_app(FakeEngineClient())) as client:
        document = (await client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    assert "prompt" in schemas["CompletionRequest"]["properties"]
    assert "messages" in schemas["ChatRequest"]["properties"]
    body = document["paths"][CHAT]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert body == {"$ref": "#/components/schemas/ChatRequest"}
    references = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert references <= set(schemas)


async def test_a_flood_of_unknown_fields_is_not_counted_name_by_name() -> None:
    metrics = FakeMetrics()
    body = {"prompt": "a", **{f"field_{number}": 1 for number in range(5000)}}
    async with connect(build_app(FakeEngineClient(), metrics=metrics)) as client:
        assert (await client.post(COMPLETIONS, json=body)).status_code == 200
    assert len(metrics.unknown) == 100
