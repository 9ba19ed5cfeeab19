"""What every HTTP connection has, whichever parser reads it: its deadlines, and the answer to what is no request.

Nothing here happens once a token: a timer is set where bytes do not come, or do not go.
"""

from __future__ import annotations

import asyncio
import http
import logging
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from server.errors import ErrorKind, RequestError, build_error_response

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpTimeouts:
    """How long a client may take.

    Attributes:
        keep_alive_s: Between two requests, and before the first. Longer than the idle time of usual proxies (60 s): it
            is theirs, not ours, to close an idle connection.
        read_s: From the first byte of a request's head to its last, and then of its body.
        write_s: To take what has been written, once the buffers are full.
    """

    keep_alive_s: int = 75
    read_s: float = 30.0
    write_s: float = 60.0


class ConnectionClock:
    """The two timers of a connection.

    Args:
        loop: The running one.
        timeouts: How long they run.
        on_late: Called when a request has not arrived in time.
        on_deaf: Called when an answer has not been taken in time.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        timeouts: HttpTimeouts,
        *,
        on_late: Callable[[], None],
        on_deaf: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._timeouts = timeouts
        self._on_late = on_late
        self._on_deaf = on_deaf
        self._read_timer: asyncio.TimerHandle | None = None
        self._was_held = False
        self._write_timer: asyncio.TimerHandle | None = None

    def watch_reading(self, is_waiting: bool, *, is_held: bool = False) -> None:
        """Let the client have so long for what is missing of its request, or stop the timer where nothing is.

        Args:
            is_waiting: Something is missing.
            is_held: But it is the server that does not read on now; such time does not count.
        """
        self._was_held = self._was_held or is_held
        if not is_waiting:
            self.restart_reading()
        elif self._read_timer is None:
            self._read_timer = self._loop.call_later(self._timeouts.read_s, self._be_late)

    def restart_reading(self) -> None:
        """Stop the timer: another part of a request begins, and has all the time again."""
        self._was_held = False
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def watch_writing(self, is_blocked: bool) -> None:
        """Let the client have so long to take what is written, or stop the timer where it has."""
        if is_blocked:
            if self._write_timer is None:
                self._write_timer = self._loop.call_later(self._timeouts.write_s, self._be_deaf)
        elif self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def close(self) -> None:
        """Stop both; the connection is gone."""
        self.restart_reading()
        self.watch_writing(False)

    def build_late_error(self, *, is_in_head: bool) -> RequestError:
        """Return what a client is told whose request has not arrived in time."""
        part = "head" if is_in_head else "body"
        message = f"The request's {part} did not arrive within {self._timeouts.read_s:g} s; send it faster."
        return RequestError(message, kind=ErrorKind.SLOW_REQUEST)

    def _be_late(self) -> None:
        self._read_timer = None
        if self._was_held:
            self._was_held = False
            self.watch_reading(True)
        else:
            self._on_late()

    def _be_deaf(self) -> None:
        self._write_timer = None
        logger.info("a client has not read its answer for %g s: its connection is cut", self._timeouts.write_s)
        self._on_deaf()


def build_refusal(error: RequestError, default_headers: Iterable[tuple[bytes, bytes]]) -> bytes:
    """Return the whole answer to a request that no application sees; the connection ends with it."""
    # Never the client's own id: a head that is refused is not read for one.
    response = build_error_response(error, {"Connection": "close", "X-Request-Id": uuid.uuid4().hex})
    head = [f"HTTP/1.1 {response.status_code} {http.HTTPStatus(response.status_code).phrase}\r\n".encode()]
    for name, value in (*default_headers, *response.raw_headers):
        head += (name, b": ", value, b"\r\n")
    return b"".join((*head, b"\r\n", bytes(response.body)))


def close_for_good(transport: asyncio.Transport) -> None:
    """Close a connection whose client has had its time: what it has not taken by now it does not get."""
    transport.close()
    if transport.get_write_buffer_size():
        transport.abort()
