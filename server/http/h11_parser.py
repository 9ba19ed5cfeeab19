"""uvicorn's h11 protocol with deadlines: what is left of parser.py's manners where httptools is missing."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.config import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from server.http.connection import ConnectionClock, HttpTimeouts, build_refusal, close_for_good

logger = logging.getLogger(__name__)


class TimedH11Protocol(H11Protocol):
    """One connection.

    Args:
        config: uvicorn's, as are those up to ``_loop``.
        server_state: Of all connections.
        app_state: What the lifespan left.
        _loop: None = the running one.
        on_refusal: Told the status of each request that is refused before the application sees it.
        timeouts: How long the client may take.
    """

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        on_refusal: Callable[[int], None],
        timeouts: HttpTimeouts,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._on_refusal = on_refusal
        self._clock = ConnectionClock(self.loop, timeouts, on_late=self._take_late, on_deaf=self._take_deaf)
        self._read_state = self.conn.their_state

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._clock.close()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def timeout_keep_alive_handler(self) -> None:
        close_for_good(self.transport)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        state = self.conn.their_state
        if state is not self._read_state:
            self._read_state = state
            self._clock.restart_reading()
        is_waiting = state is h11.SEND_BODY or (state is h11.IDLE and not self._is_answering)
        self._clock.watch_reading(is_waiting and not self.transport.is_closing(), is_held=self.flow.read_paused)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._clock.watch_writing(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._clock.watch_writing(self.transport.is_closing())

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.transport.is_closing():
            self._clock.watch_writing(self.transport.get_write_buffer_size() > 0)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _take_deaf(self) -> None:
        self.transport.abort()

    def _take_late(self) -> None:
        if self.flow.read_paused:
            self._clock.watch_reading(True, is_held=True)
            return
        is_in_head = self.conn.their_state is h11.IDLE
        error = self._clock.build_late_error(is_in_head=is_in_head)
        logger.info("a connection was refused: %s", error.message)
        if is_in_head:
            self._on_refusal(error.reply.status)
        if is_in_head or (self._is_answering and not self.cycle.response_started):
            self.transport.write(build_refusal(error, self.server_state.default_headers))
        if self._is_answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self.transport.close()
