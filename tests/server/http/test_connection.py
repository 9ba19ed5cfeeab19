"""Clients that keep the server waiting, read by either parser."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

import pytest

from server.http.connection import HttpTimeouts
from tests.server.http_connection import Connection, EchoApp, connected

GOOD = b"GET /good HTTP/1.1\r\nHost: h\r\n\r\n"
POST = b"POST /%b HTTP/1.1\r\nHost: h\r\nContent-Length: 4\r\n\r\n"
SOON = HttpTimeouts(keep_alive_s=60, read_s=0.15, write_s=60.0)


@pytest.fixture(autouse=True, params=["httptools", "h11"])
def parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "h11":
        monkeypatch.setitem(sys.modules, "httptools", None)
    return str(request.param)


async def trickle(connection: Connection, data: bytes) -> None:
    """Send a byte now and then, for longer than anything may take here."""
    for byte in data:
        await connection.send(bytes([byte]))
        await asyncio.sleep(0.02)


async def read_error(connection: Connection) -> dict[str, Any]:
    error = await connection.read_refusal()
    assert (error["status"], error["code"]) == (408, "slow_request")
    return error


async def test_a_head_that_trickles_is_408_and_counted() -> None:
    async with connected(timeouts=SOON) as connection:
        trickling = asyncio.create_task(trickle(connection, b"GET / HTTP/1.1\r\nHost: host.example"))
        error = await read_error(connection)
        assert error["message"] == "The request's head did not arrive within 0.15 s; send it faster."
        assert connection.refusals == [408]
        trickling.cancel()


async def test_a_body_that_trickles_is_408_and_its_request_sees_its_client_leave() -> None:
    app = EchoApp()
    async with connected(app, SOON) as connection:
        await connection.send(POST % b"", b"bo")
        error = await read_error(connection)
        assert error["message"] == "The request's body did not arrive within 0.15 s; send it faster."
        await asyncio.wait_for(app.was_disconnected.wait(), 5)
        assert connection.refusals == [], "the application saw it"


async def test_head_and_body_have_all_the_time_each() -> None:
    head = POST % b""
    async with connected(timeouts=HttpTimeouts(read_s=0.8)) as connection:
        await connection.send(head[:20])
        await asyncio.sleep(0.5)
        await connection.send(head[20:])
        await asyncio.sleep(0.5)
        await connection.send(b"body")
        assert (await connection.read_reply())[2]["body"] == "body"


async def test_a_server_that_takes_its_time_is_no_slow_client() -> None:
    app = EchoApp()
    async with connected(app, SOON) as connection:
        await connection.send(POST % b"held" + b"body")
        await app.has_begun.wait()
        await asyncio.sleep(0.3)
        app.gate.set()
        assert (await connection.read_reply())[0] == 200
        await asyncio.sleep(0.3)
        await connection.send(GOOD)  # nor is one that keeps its connection
        assert (await connection.read_reply())[0] == 200


async def test_a_large_body_waits_for_the_server_as_long_as_that_takes() -> None:
    app, body = EchoApp(), b"b" * 1_000_000
    async with connected(app, SOON) as connection:
        head = b"POST /held HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body)
        connection.writer.write(head + body)
        await app.has_begun.wait()
        await asyncio.sleep(0.4)
        app.gate.set()
        assert len((await connection.read_reply())[2]["body"]) == len(body)


@pytest.mark.parametrize(
    ("data", "timeouts"),
    [(b"", HttpTimeouts(keep_alive_s=0)), (b"\r\n", HttpTimeouts(keep_alive_s=60, read_s=0.1))],
    ids=["nothing", "blank lines"],
)
async def test_who_connects_and_asks_nothing_is_not_kept(data: bytes, timeouts: HttpTimeouts) -> None:
    async with connected(timeouts=timeouts) as connection:
        await connection.send(data)
        await asyncio.wait_for(connection.reader.read(), 5)


async def test_a_client_that_does_not_read_is_cut_and_its_request_told(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    app = EchoApp()
    async with connected(app, HttpTimeouts(write_s=0.2)) as connection:
        connection.writer.transport.pause_reading()
        await connection.send(b"GET /flood HTTP/1.1\r\nHost: h\r\n\r\n")
        await asyncio.wait_for(app.was_disconnected.wait(), 5)
    assert "has not read its answer for 0.2 s" in caplog.text
    # Of h11 the listener says that it is slow.
    loud = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.name for record in loud if record.name != "server.http.listener"] == []


async def test_a_client_that_reads_in_time_gets_everything() -> None:
    app = EchoApp()
    async with connected(app, HttpTimeouts(write_s=1.0)) as connection:
        await connection.send(b"GET /flood HTTP/1.1\r\nHost: h\r\n\r\n")
        num_bytes = 0
        while num_bytes < 100 * 100_000:
            num_bytes += len(await connection.reader.read(1 << 20))
            await asyncio.sleep(0.01)
        assert not app.was_disconnected.is_set()


async def test_a_pipelined_client_that_leaves_is_noticed_by_the_request_being_answered() -> None:
    app = EchoApp()
    async with connected(app) as connection:
        await connection.send(b"GET /watch HTTP/1.1\r\nHost: h\r\n\r\n" + GOOD + GOOD)
        await app.has_begun.wait()
        connection.writer.transport.abort()
        await asyncio.wait_for(app.was_disconnected.wait(), 5)


async def test_of_pipelined_requests_one_that_closes_is_the_last() -> None:
    closing = b"GET /last HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
    async with connected() as connection:
        await connection.send(GOOD + closing)
        assert (await connection.read_reply())[2]["path"] == "/good"
        _, headers, body = await connection.read_reply()
        assert (headers["connection"], body["path"]) == ("close", "/last")
        await connection.expect_end()
