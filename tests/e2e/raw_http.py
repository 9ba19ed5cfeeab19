"""HTTP/1.1 as bytes: requests written exactly as a test wants them, sent over connections of their own."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Reply:
    """What came back: the first answer of a connection, and the bytes behind it."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    rest: bytes = b""

    def read_error(self) -> dict[str, Any]:
        """Return the error object; the body must hold that and nothing else, with all four keys."""
        envelope = json.loads(self.body)
        assert list(envelope) == ["error"]
        error: dict[str, Any] = envelope["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error


def build_request(
    path: str,
    body: bytes,
    *,
    method: str = "POST",
    version: str = "1.1",
    headers: Mapping[str, str | None] | None = None,
) -> bytes:
    """Return a request as a client writes it; a header of None is left out."""
    all_headers: dict[str, str | None] = {
        "Host": "server",
        "Content-Type": "application/json",
        "Content-Length": str(len(body)),
        **(headers or {}),
    }
    lines = [f"{method} {path} HTTP/{version}", *(f"{name}: {text}" for name, text in all_headers.items() if text)]
    return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


def send(port: int, *parts: bytes | Iterable[bytes], is_half_closed: bool = False) -> Reply:
    """Send bytes over a connection of their own and read the answer, even one that comes before all is sent."""
    with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
        with suppress(BrokenPipeError, ConnectionResetError):
            for part in parts:
                for piece in [part] if isinstance(part, bytes) else part:
                    sock.sendall(piece)
            if is_half_closed:
                sock.shutdown(socket.SHUT_WR)
        return read_reply(sock)


def read_reply(sock: socket.socket, received: bytes = b"") -> Reply:
    """Read one answer that says how long it is."""
    while b"\r\n\r\n" not in received:
        received += _receive(sock)
    head, _, received = received.partition(b"\r\n\r\n")
    status_line, *lines = head.decode("latin-1").split("\r\n")
    headers = {name.lower(): text for name, _, text in (line.partition(": ") for line in lines)}
    status = int(status_line.split()[1])
    if status == 100:
        return read_reply(sock, received)
    length = int(headers["content-length"])
    while len(received) < length:
        received += _receive(sock)
    return Reply(status, headers, received[:length], received[length:])


def iter_chunked(num_bytes: int) -> Iterator[bytes]:
    """A body of spaces in chunked coding."""
    for _ in range(num_bytes // _CHUNK_BYTES):
        yield b"%x\r\n%b\r\n" % (_CHUNK_BYTES, b" " * _CHUNK_BYTES)
    yield b"0\r\n\r\n"


def _receive(sock: socket.socket) -> bytes:
    data = sock.recv(1 << 16)
    assert data, "the connection was closed before the answer was complete"
    return data
