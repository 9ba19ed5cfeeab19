"""A server on loopback that answers as a test wants it to: bytes as they stand, or a broken connection."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from server.bench.target import Target

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


@dataclass(frozen=True)
class Request:
    """What a client sent."""

    first_line: str
    headers: dict[str, str]
    body: dict[str, Any]


Answer = Callable[[Request, asyncio.StreamWriter], Awaitable[None]]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(value: object) -> bytes:
    data = value if isinstance(value, str) else json.dumps(value)
    return chunk(f"data: {data}\n\n".encode())


def token(text: str = " word", finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"index": 0, "text": text, "finish_reason": finish_reason}], "usage": None})


def usage(num_prompt_tokens: int, num_output_tokens: int, num_cached_tokens: int = 0) -> bytes:
    counts = {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": num_cached_tokens},
    }
    return event({"choices": [], "usage": counts})


def plain(status: str, body: bytes) -> bytes:
    return f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


async def obey(request: Request, writer: asyncio.StreamWriter) -> None:
    """Answer as a server that does what it is asked."""
    if request.first_line.startswith("GET"):
        writer.write(plain("200 OK", b'{"data": [{"id": "stub"}]}'))
        return
    num_tokens = request.body["max_tokens"]
    writer.write(HEAD)
    for _ in range(num_tokens - 1):
        writer.write(token())
        await writer.drain()
    writer.write(token(finish_reason="length"))
    writer.write(usage(len(request.body["prompt"].split()), num_tokens) + event("[DONE]") + END)


def say(*pieces: bytes) -> Answer:
    """Return an answer of these bytes, whatever is asked; the connection is closed after them."""

    async def answer(_: Request, writer: asyncio.StreamWriter) -> None:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()

    return answer


class StubServer:
    """`async with StubServer(say(b"HTTP/1.1 400 ...")) as server: ... server.target`.

    Attributes:
        requests: What came so far.
        most_open: Connections, the most at a time.
        quiet: Set while there is no connection.
    """

    def __init__(self, answer: Answer = obey) -> None:
        self.requests: list[Request] = []
        self.most_open = self._num_open = 0
        self.quiet = asyncio.Event()
        self._answer = answer

    async def __aenter__(self) -> StubServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.target = Target("127.0.0.1", self._server.sockets[0].getsockname()[1])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.die()

    async def die(self) -> None:
        """Stop listening."""
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_open += 1
        self.most_open = max(self.most_open, self._num_open)
        self.quiet.clear()
        try:
            request = await _read_request(reader)
            self.requests.append(request)
            await self._answer(request, writer)
            await writer.drain()
        except ConnectionError:
            pass
        finally:
            self._num_open -= 1
            if not self._num_open:
                self.quiet.set()
            writer.close()


async def _read_request(reader: asyncio.StreamReader) -> Request:
    first, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().strip().split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Request(first, headers, json.loads(body) if body else {})
