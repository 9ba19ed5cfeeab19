"""Pure ASGI middleware that counts and times HTTP requests. Changes nothing that passes through it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.routes.probes import UncountedRoute

# Whoever connects may send any word as a method, and any path: what is not ours is one series.
OTHER = "other"
# The scope's key for the server's own `send`. Once an answer has begun, no middleware looks at what follows: whoever
# sends a message a token goes past them all.
DIRECT_SEND = "pointsman.send"
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})


class HttpMetrics(Protocol):
    """The metrics that HTTP feeds."""

    def record_http(self, *, method: str, status: str, handler: str, duration_s: float) -> None:
        """Add one answered request."""


class HttpMetricsMiddleware:
    """Tells the metrics of every request but probes'. Belongs outermost, where it sees what the others refuse.

    Args:
        app: What answers.
        metrics: Told of each answer when its last byte has been sent, or nothing more will be.
        clock: Seconds, monotonic.
    """

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, clock: Callable[[], float] = time.perf_counter) -> None:
        self._app = app
        self._metrics = metrics
        self._clock = clock

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = self._clock()
        scope[DIRECT_SEND] = send
        status = 500  # what a client sees of an exception before the answer's head

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        finally:
            # The router leaves it here; there is none where none was found or asked for.
            route = scope.get("route")
            # Asked for every few seconds, or for hours: counted, they would drown what people ask.
            if not isinstance(route, UncountedRoute):
                method = scope["method"]
                self._metrics.record_http(
                    method=method if method in _METHODS else OTHER,
                    status=f"{status // 100}xx",
                    handler=getattr(route, "path", None) or OTHER,
                    duration_s=self._clock() - started,
                )
