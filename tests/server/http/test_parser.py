"""The parser over real sockets: what it takes, what it refuses, and that nothing else on the connection suffers."""

from __future__ import annotations

import asyncio
import logging

import pytest

from server.errors import ERROR_TABLE, ErrorKind
from server.http.parser import MAX_HEAD_BYTES, MAX_HEADERS
from tests.server.http_connection import EchoApp, connected

GOOD = b"GET /good HTTP/1.1\r\nHost: h\r\n\r\n"
TOO_LARGE, MALFORMED = ERROR_TABLE[ErrorKind.HEADERS_TOO_LARGE], ERROR_TABLE[ErrorKind.MALFORMED_REQUEST]


def build_head(num_headers: int, size: int = 1) -> bytes:
    headers = b"".join(b"X-%d: %s\r\n" % (number, b"v" * size) for number in range(num_headers))
    return b"GET / HTTP/1.1\r\n" + headers + b"\r\n"


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[start : start + size] for start in range(0, len(data), size)]


# ---------------------------------------------------------------------- what is taken
async def test_good_requests_follow_each_other_on_one_connection() -> None:
    async with connected() as connection:
        for _ in range(2):
            await connection.send(GOOD)
            status, _, body = await connection.read_reply()
            assert (status, body["path"]) == (200, "/good")
        assert connection.refusals == []


@pytest.mark.parametrize("packet_bytes", [1 << 20, 4096])
async def test_a_head_at_the_limits_is_taken(packet_bytes: int) -> None:
    async with connected() as connection:
        await connection.send(*cut(build_head(MAX_HEADERS, 600), packet_bytes))
        status, _, body = await connection.read_reply()
        assert (status, len(body["headers"])) == (200, MAX_HEADERS)
        # The count starts anew with each request.
        await connection.send(build_head(MAX_HEADERS, 600))
        assert (await connection.read_reply())[0] == 200


async def test_a_large_body_is_no_large_head() -> None:
    body = b"b" * (4 * MAX_HEAD_BYTES)
    async with connected() as connection:
        await connection.send(b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(body), *cut(body, 10_000))
        assert len((await connection.read_reply())[2]["body"]) == len(body)


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with connected() as connection:
        await connection.send(b"".join(b"GET /%d HTTP/1.1\r\n\r\n" % number for number in range(5)))
        assert [(await connection.read_reply())[2]["path"] for _ in range(5)] == ["/0", "/1", "/2", "/3", "/4"]


# ---------------------------------------------------------------------- what is refused
@pytest.mark.parametrize(
    "packets",
    [
        [build_head(MAX_HEADERS + 1)],
        cut(build_head(MAX_HEADERS + 1), 100),
        [build_head(1, MAX_HEAD_BYTES + 1024)],
        cut(build_head(1, MAX_HEAD_BYTES + 1024), 1000),
        cut(build_head(90, 800), 1000),
        [b"GET /" + b"u" * 70_000 + b" HTTP/1.1\r\n\r\n"],
        cut(b"GET /" + b"u" * 70_000 + b" HTTP/1.1\r\n\r\n", 1000),
        # No header and no request line is ever complete here.
        [b"GET / HTTP/1.1\r\nX: ", *[b"v" * 1000] * 70],
        [b"GET / HTTP/1.1\r\n", *[b"n" * 1000] * 70],
        [b"\r\n" * 500] * 70,
    ],
    ids=(
        "headers",
        "headers-cut",
        "one-header",
        "one-header-cut",
        "sum-cut",
        "request-line",
        "request-line-cut",
        "endless-value",
        "endless-name",
        "blank-lines",
    ),
)
async def test_a_head_that_is_too_large_is_431_whatever_its_packets(packets: list[bytes]) -> None:
    async with connected() as connection:
        await connection.send(*packets)
        error = await connection.read_refusal()
    assert (error["status"], error["code"]) == (431, TOO_LARGE.code)
    assert connection.refusals == [431]
    assert error["message"].endswith("send less.")


async def test_a_client_that_goes_on_sending_still_reads_why_it_was_refused() -> None:
    async with connected() as connection:
        await connection.send(b"GET / HTTP/1.1\r\nX: ", *[b"v" * 50_000] * 100)
        assert (await connection.read_refusal())["status"] == 431


@pytest.mark.parametrize(
    "data",
    [
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"hello\r\n\r\n",
        b"CONNECT example.org:443 HTTP/1.1\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
    ],
)
async def test_what_is_no_request_is_400_and_one_quiet_line_in_the_log(
    data: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    async with connected() as connection:
        await connection.send(data)
        error = await connection.read_refusal()
    assert (error["status"], error["code"]) == (400, MALFORMED.code)
    assert connection.refusals == [400]
    records = [record for record in caplog.records if record.levelno > logging.DEBUG and "uvicorn" not in record.name]
    assert [record.levelname for record in records] == ["INFO"]
    assert not any(record.exc_info or record.levelno >= logging.WARNING for record in caplog.records)


async def test_requests_before_a_refused_one_get_their_answers_first() -> None:
    app = EchoApp()
    async with connected(app) as connection:
        await connection.send(b"GET /held HTTP/1.1\r\n\r\n" + GOOD + build_head(MAX_HEADERS + 1))
        await app.has_begun.wait()
        app.gate.set()
        assert (await connection.read_reply())[2]["path"] == "/held"
        assert (await connection.read_reply())[2]["path"] == "/good"
        assert (await connection.read_refusal())["status"] == 431
        assert connection.refusals == [431]


async def test_a_body_that_goes_wrong_ends_its_request_which_the_application_counts() -> None:
    app = EchoApp()
    async with connected(app) as connection:
        await connection.send(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nab\r\n", b"no length\r\n")
        assert (await connection.read_refusal())["status"] == 400
        await asyncio.wait_for(app.was_disconnected.wait(), 5)
        assert connection.refusals == []


async def test_trailers_count_as_headers() -> None:
    trailers = b"".join(b"T-%d: v\r\n" % number for number in range(MAX_HEADERS + 1))
    async with connected() as connection:
        await connection.send(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n", b"0\r\n" + trailers)
        assert (await connection.read_refusal())["status"] == 431


# ---------------------------------------------------------------------- upgrades
@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
async def test_an_upgrade_is_ignored_and_the_request_answered_with_its_body(
    protocol: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    request = (
        b"POST /up HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: %s\r\n"
        b"HTTP2-Settings: AAMAAABk\r\nContent-Length: 4\r\n\r\nbo" % protocol
    )
    async with connected() as connection:
        await connection.send(request, b"dy")
        status, _, body = await connection.read_reply()
        assert (status, body["path"], body["body"]) == (200, "/up", "body")
        assert body["headers"] == ["host", "content-length"]
        await connection.send(GOOD)
        assert (await connection.read_reply())[2]["path"] == "/good"
    assert "WebSocket" not in caplog.text and "upgrade" not in caplog.text.lower()


async def test_an_upgrade_that_closes_is_closed() -> None:
    async with connected() as connection:
        await connection.send(b"GET /up HTTP/1.1\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n")
        assert (await connection.read_reply())[1]["connection"] == "close"
        await connection.expect_end()
