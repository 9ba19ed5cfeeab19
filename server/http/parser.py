"""uvicorn's httptools protocol with limits and manners: heads of bounded size, deadlines, errors in our shape, upgrades
ignored.

Imports httptools; where that is missing, h11_parser.py does without.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from server.errors import ErrorKind, RequestError
from server.http.connection import ConnectionClock, HttpTimeouts, build_refusal, close_for_good

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 100
# After a refusal the client may still be sending; closing at once would reset the connection before it reads why.
_LINGER_S = 2.0
# What only an upgrade means; `connection` is written anew.
_UPGRADE_HEADERS = (b"upgrade", b"http2-settings", b"connection")


class LimitedHttpToolsProtocol(HttpToolsProtocol):
    """One connection.

    Args:
        config: uvicorn's, as are those up to ``_loop``.
        server_state: Of all connections.
        app_state: What the lifespan left.
        _loop: None = the running one.
        on_refusal: Told the status of each request that is refused before the application sees it.
        timeouts: How long the client may take.

    httptools keeps a header until it is complete and calls nobody meanwhile, so two things are counted: what came
    through callbacks, and the bytes of packets that led to none.
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
        # The request being answered; uvicorn's own `cycle` is the last one that came.
        self._answered: RequestResponseCycle | None = None
        self._num_head_bytes = 0
        self._num_silent_bytes = 0
        self._has_called_back = False
        self._is_in_head = True
        self._is_between = True
        self._has_refused = False
        self._refusal: RequestError | None = None

    # ------------------------------------------------------------------ the connection
    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        # uvicorn starts this timer after an answer only; who connects and says nothing is no better.
        self.timeout_keep_alive_task = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._clock.close()
        self.pipeline.clear()
        answered = self._answered
        if answered is not None and answered is not self.cycle and not answered.response_complete:
            # uvicorn tells the last request that came, not the one that is being answered.
            answered.disconnected = True
            answered.message_event.set()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def timeout_keep_alive_handler(self) -> None:
        close_for_good(self.transport)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._clock.watch_writing(True)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._clock.watch_writing(self.transport.is_closing())

    def _take_deaf(self) -> None:
        self.transport.abort()

    def _take_late(self) -> None:
        if self.flow.read_paused:
            self._clock.watch_reading(True, is_held=True)
        elif self._is_in_head or not self.cycle.response_complete:
            self._refuse(self._clock.build_late_error(is_in_head=self._is_in_head))
        else:
            close_for_good(self.transport)  # it has been answered without its body

    # ------------------------------------------------------------------ bytes
    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._has_refused:
            return
        self._has_called_back = False
        try:
            self.parser.feed_data(data)
            self._note_packet(len(data))
        except httptools.HttpParserUpgrade as upgrade:
            self._ignore_upgrade(data[upgrade.args[0] :])
        except (httptools.HttpParserError, RequestError) as error:
            self._refuse(_find_refusal(error))
        # Most requests come in one piece, and set no timer.
        is_waiting = not self._has_refused and not (self._is_between and self._is_answering)
        self._clock.watch_reading(is_waiting, is_held=self.flow.read_paused)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _note_packet(self, num_bytes: int) -> None:
        self._num_silent_bytes = 0 if self._has_called_back else self._num_silent_bytes + num_bytes
        self._check_size()

    def _check_size(self) -> None:
        if self._num_head_bytes + self._num_silent_bytes > MAX_HEAD_BYTES:
            raise _too_large(f"more than {MAX_HEAD_BYTES} bytes")

    # ------------------------------------------------------------------ what the parser tells
    def on_message_begin(self) -> None:
        self._has_called_back = True
        self._is_in_head = True
        self._is_between = False
        self._num_head_bytes = 0
        self._clock.restart_reading()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._has_called_back = True
        self._num_head_bytes += len(url)
        self._check_size()
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Trailers come here as well, and count as headers.
        self._has_called_back = True
        self._num_silent_bytes = 0
        self._num_head_bytes += len(name) + len(value) + len(b": \r\n")
        self._check_size()
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            raise _too_large(f"more than {MAX_HEADERS} headers")

    def on_headers_complete(self) -> None:
        self._has_called_back = True
        super().on_headers_complete()
        self._is_in_head = False
        self._clock.restart_reading()
        if not self.pipeline:
            self._answered = self.cycle

    def on_body(self, body: bytes) -> None:
        self._has_called_back = True
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._has_called_back = True
        self._is_in_head = True
        self._is_between = True
        super().on_message_complete()

    # ------------------------------------------------------------------ upgrades
    def _should_upgrade(self) -> bool:
        # Asked where the parser has seen an upgrade: this request waits for _ignore_upgrade.
        return True

    def _ignore_upgrade(self, rest: bytes) -> None:
        """Read the request again without its wish for another protocol, as a server may that speaks only this one.

        The parser takes what follows for the other protocol, so it must not keep the connection: curl --http2 and
        Java's HttpClient send a body there.
        """
        if self.scope["method"] == "CONNECT":
            self._refuse(RequestError("This server is no proxy.", kind=ErrorKind.MALFORMED_REQUEST))
            return
        kept = [(name, value) for name, value in self.headers if name not in _UPGRADE_HEADERS]
        if not self.parser.should_keep_alive():
            kept.append((b"connection", b"close"))
        version = self.scope["http_version"].encode()
        head = [self.scope["method"].encode(), b" ", self.url, b" HTTP/", version, b"\r\n"]
        for name, value in kept:
            head += (name, b": ", value, b"\r\n")
        self.parser = httptools.HttpRequestParser(self)
        self.data_received(b"".join((*head, b"\r\n", rest)))

    # ------------------------------------------------------------------ refusals
    def on_response_complete(self) -> None:
        if self.pipeline:
            self._answered = self.pipeline[-1][0]
        super().on_response_complete()
        if self.transport.is_closing():
            self._clock.watch_writing(self.transport.get_write_buffer_size() > 0)
        if self._refusal is not None and self.cycle.response_complete:
            self._write_refusal(self._refusal)

    def _refuse(self, error: RequestError) -> None:
        logger.info("a connection was refused: %s", error.message)
        self._has_refused = True
        if self._is_in_head:
            self._on_refusal(error.reply.status)
        if not self._is_answering:
            self._write_refusal(error)
        elif self._is_in_head:
            # The requests before it get their answers first.
            self._refusal = error
        else:
            self._break_off(error)

    def _break_off(self, error: RequestError) -> None:
        """End the request whose body went wrong."""
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        if self.pipeline or self.cycle.response_started:
            self.transport.close()
        else:
            self._write_refusal(error)

    def _write_refusal(self, error: RequestError) -> None:
        if self.transport.is_closing():
            return
        self.transport.write(build_refusal(error, self.server_state.default_headers))
        if self.transport.can_write_eof():  # TLS knows no half of a connection
            self.transport.write_eof()
        self.flow.resume_reading()
        self._unset_keepalive_if_required()
        self.loop.call_later(_LINGER_S, close_for_good, self.transport)


def _too_large(what: str) -> RequestError:
    return RequestError(f"The request's head has {what}; send less.", kind=ErrorKind.HEADERS_TOO_LARGE)


def _find_refusal(error: Exception) -> RequestError:
    # What a callback raised is the context of what the parser raises.
    for candidate in (error, error.__context__):
        if isinstance(candidate, RequestError):
            return candidate
    return RequestError("This is not HTTP/1.1 as this server reads it.", kind=ErrorKind.MALFORMED_REQUEST)
