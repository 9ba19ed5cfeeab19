"""Pure ASGI middleware that keeps a record of each HTTP request and hands it over at the end. Changes nothing.

Belongs outside of all that refuses requests, and inside of HttpMetricsMiddleware, which lets whoever sends a message a
token go past the others.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import STATUS_CLIENT_GONE
from server.http.limits import get_label
from server.logs.http_record import ErrorNote, HttpRecord, set_http_record
from server.logs.request_log import RequestLog
from server.logs.trace_context import read_trace_context
from server.principal import get_principal
from server.routes.probes import ProbeRoute

# What ended a request that nobody answered: the server cut it off, or met what it had not foreseen.
_CANCELLED = ErrorNote("cancelled", 503)
_FAILED = ErrorNote("internal_error", 500)


class HttpLogMiddleware:
    """Records every request but probes', which machines ask every few seconds.

    Args:
        app: What answers.
        request_log: Told of each request when its last byte has been sent, or nothing more will be.
        clock: Seconds, the engine's.
    """

    def __init__(self, app: ASGIApp, request_log: RequestLog, clock: Callable[[], float] = time.monotonic) -> None:
        self._app = app
        self._request_log = request_log
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = HttpRecord(scope["method"], scope["path"], self._clock())
        set_http_record(scope, record)

        async def send_noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except asyncio.CancelledError:
            record.error = record.error or _CANCELLED
            raise
        except Exception:
            record.error = record.error or _FAILED
            raise
        finally:
            record.end_time = self._clock()
            # The router leaves it here; a request that was refused before has none.
            if not isinstance(scope.get("route"), ProbeRoute):
                self._complete(record, scope)
                self._request_log.end(record)

    def _complete(self, record: HttpRecord, scope: Scope) -> None:
        record.label = get_label(scope)
        record.scheme = scope.get("scheme", "http")
        record.key_id = get_principal(scope).key_id
        record.parent = read_trace_context(scope["headers"])
        if record.status is None:
            record.status = STATUS_CLIENT_GONE if record.client_disconnected else 500
