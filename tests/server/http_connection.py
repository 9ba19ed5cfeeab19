"""A raw client of the real HTTP server, and an application that says what it saw."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from starlette.types import Receive, Scope, Send

from server.http.connection import HttpTimeouts
from server.http.listener import bind, create_http_server, listen


class EchoApp:
    """Answers with the request as JSON; /held waits for ``gate`` before its body, /flood sends 10 MB, /watch a
    byte, and then they wait for the client to leave.

    Attributes:
        gate: What /held waits for.
        has_begun: One of these has been asked for.
        was_disconnected: A client left before its answer.
    """

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.has_begun = asyncio.Event()
        self.was_disconnected = asyncio.Event()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            for phase in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{phase}.complete"})
            return
        assert scope["type"] == "http"
        if scope["path"] == "/held":
            self.has_begun.set()
            await self.gate.wait()
        if scope["path"] in ("/flood", "/watch"):
            await self._wait_for_departure(receive, send, num_bytes=10_000_000 if scope["path"] == "/flood" else 1)
            return
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message["body"]
            if not message["more_body"]:
                break
        else:
            self.was_disconnected.set()
            return
        await self._answer(scope, body, send)

    async def _wait_for_departure(self, receive: Receive, send: Send, *, num_bytes: int) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        self.has_begun.set()
        for start in range(0, num_bytes, 100_000):
            part = b"x" * min(100_000, num_bytes - start)
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await receive()  # the body
        if (await receive())["type"] == "http.disconnect":
            self.was_disconnected.set()

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        seen = {
            "method": scope["method"],
            "path": scope["path"],
            "body": body.decode(),
            "headers": [name.decode() for name, _ in scope["headers"]],
        }
        text = json.dumps(seen).encode()
        headers = [(b"content-length", str(len(text)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": text})


class Connection:
    """A raw client.

    Attributes:
        reader: Its end of the socket.
        writer: The same.
        refusals: What the server counted as refused.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, refusals: list[int]) -> None:
        self.reader = reader
        self.writer = writer
        self.refusals = refusals

    async def send(self, *packets: bytes) -> None:
        for packet in packets:
            self.writer.write(packet)
            await self.writer.drain()
            await asyncio.sleep(0)  # so that the server, on the same loop, reads it before the next

    async def read_reply(self) -> tuple[int, dict[str, str], Any]:
        """Status, headers, decoded JSON body."""
        head = (await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 5)).decode()
        status_line, *lines = head.rstrip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        body = await self.reader.readexactly(int(headers["content-length"]))
        return int(status_line.split()[1]), headers, json.loads(body)

    async def read_refusal(self) -> dict[str, Any]:
        """The error of a refusal that is well-formed and ends the connection; status added."""
        status, headers, body = await self.read_reply()
        assert headers["content-type"] == "application/json"
        assert headers["connection"] == "close"
        assert re.fullmatch("[0-9a-f]{32}", headers["x-request-id"])
        await self.expect_end()
        assert set(body["error"]) == {"message", "type", "param", "code"}
        return {"status": status, **body["error"]}

    async def expect_end(self) -> None:
        assert await asyncio.wait_for(self.reader.read(), 5) == b""


@asynccontextmanager
async def connected(app: EchoApp | None = None, timeouts: HttpTimeouts | None = None) -> AsyncIterator[Connection]:
    sock = bind("127.0.0.1", 0)
    listen(sock)
    refusals: list[int] = []
    server = create_http_server(app or EchoApp(), grace_s=1, on_refusal=refusals.append, timeouts=timeouts)
    serving = asyncio.create_task(server.serve(sockets=[sock]))
    reader, writer = await asyncio.open_connection(*sock.getsockname())
    writer.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        yield Connection(reader, writer, refusals)
    finally:
        writer.close()
        server.should_exit = True
        await serving
