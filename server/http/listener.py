"""The port: taken before anything slow happens, opened when there is something to say. And uvicorn's settings."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import importlib.util
import logging
import socket
import ssl
from collections.abc import Callable, Iterator

import uvicorn
from starlette.types import ASGIApp

from server.http.connection import HttpTimeouts

logger = logging.getLogger(__name__)

_BACKLOG = 2048
# What the system keeps of an answer that its client does not read: beyond, it is ours to notice. Left alone, Linux lets
# it grow to 4 MB a connection.
_SEND_BUFFER_BYTES = 256 * 1024


class ListenError(Exception):
    """The address cannot be listened on. The message is a sentence for the operator."""


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the daemon decides what a signal means, and which exit code follows."""

    def use_tls(self, context: ssl.SSLContext) -> None:
        """Encrypt connections; call before serving."""
        # Not by Config's own arguments, which read the files once and know no minimum version.
        self.config.load()
        self.config.ssl = context

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def cut_connections(self) -> None:
        """End every connection as it is; its request, if there is one, sees its client leave."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def bind(host: str, port: int) -> socket.socket:
    """Reserve an address without answering on it yet.

    Raises:
        ListenError: It is taken, not this machine's, or needs rights that the process lacks.
    """
    try:
        infos = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise ListenError(f"The host {host!r} is unknown ({error.strerror}); give another --host.") from None
    family, kind, protocol, _, address = infos[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)  # connections inherit it
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise ListenError(_describe(error, host, port)) from None
    return sock


def listen(sock: socket.socket) -> None:
    """Open the port: from here on the kernel takes connections, even before the event loop does.

    Raises:
        ListenError: Somebody else opened it in the meantime.
    """
    host, port = sock.getsockname()[:2]
    try:
        sock.listen(_BACKLOG)
    except OSError as error:
        raise ListenError(_describe(error, host, port)) from None


def create_http_server(
    app: ASGIApp, *, grace_s: int, on_refusal: Callable[[int], None], timeouts: HttpTimeouts | None = None
) -> HttpServer:
    """Return a server for ``app``.

    Args:
        app: The application.
        grace_s: Seconds that responses get to finish once the server is told to stop.
        on_refusal: Told the status of each request that the application never saw, because its head was refused.
        timeouts: How long clients may take; None = as the flags' defaults say.
    """
    timeouts = timeouts or HttpTimeouts()
    config = uvicorn.Config(
        app,
        http=_choose_http(on_refusal, timeouts),
        loop="auto",  # uvloop likewise
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_keep_alive=timeouts.keep_alive_s,
        timeout_graceful_shutdown=grace_s,
    )
    return HttpServer(config)


def _choose_http(on_refusal: Callable[[int], None], timeouts: HttpTimeouts) -> type[asyncio.Protocol]:
    # Not by catching ImportError: our limits stand on uvicorn's internals, and must not be lost unseen if they move.
    if importlib.util.find_spec("httptools") is None:
        logger.warning(
            "httptools is not installed, so h11 reads HTTP: more slowly, with 64 KB but any number of headers a "
            "request, and with refusals in plain text. `pip install httptools` changes that."
        )
        from server.http.h11_parser import TimedH11Protocol as HttpProtocol
    else:
        from server.http.parser import LimitedHttpToolsProtocol as HttpProtocol  # type: ignore[assignment]
    # uvicorn wants a class, and only calls it.
    return functools.partial(HttpProtocol, on_refusal=on_refusal, timeouts=timeouts)  # type: ignore[return-value]


def _describe(error: OSError, host: str, port: int) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} on {host} is taken by another program; stop it or choose another --port."
    if error.errno == errno.EACCES:
        return f"Port {port} needs rights that this user lacks; choose a --port above 1023."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine; give another --host."
    return f"Cannot listen on {host}, port {port}: {error.strerror}."
