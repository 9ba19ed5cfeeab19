"""Calls an ASGI application in this process, so that a batch line meets every check that a request over HTTP meets."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Scope


@dataclass(frozen=True, slots=True)
class AppReply:
    """What the application answered, whole.

    Attributes:
        status: HTTP status.
        headers: Of the response.
        body: Complete.
    """

    status: int
    headers: Headers
    body: bytes


async def post_json(app: ASGIApp, path: str, body: bytes) -> AppReply:
    """POST a JSON body and return the whole answer; cancelling it is, to the application, a cancelled request.

    Args:
        app: The application.
        path: Such as ``/v1/completions``.
        body: JSON in UTF-8.
    """
    requests: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
    replies: list[Message] = []
    never = asyncio.Event()

    async def receive() -> Message:
        if not requests:
            await never.wait()  # this client does not leave
        return requests.pop()

    async def send(message: Message) -> None:
        replies.append(message)

    await app(_build_scope(path, len(body)), receive, send)
    start = next(message for message in replies if message["type"] == "http.response.start")
    parts = [message.get("body", b"") for message in replies if message["type"] == "http.response.body"]
    return AppReply(start["status"], Headers(raw=start["headers"]), b"".join(parts))


def _build_scope(path: str, num_bytes: int) -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "root_path": "",
        "query_string": b"",
        "headers": [
            (b"host", b"localhost"),
            (b"content-type", b"application/json"),
            (b"content-length", str(num_bytes).encode()),
        ],
        "client": None,
        "server": None,
    }
