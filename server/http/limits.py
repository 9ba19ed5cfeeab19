"""Pure ASGI middleware that knows nothing of routes: request labels, the body's size, the last catch of errors.

Never starlette's BaseHTTPMiddleware: it puts itself between a route and `http.disconnect`.
"""

from __future__ import annotations

import re
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ErrorKind, RequestError, as_request_error, build_error_response

MAX_BODY_BYTES = 16 * 1024 * 1024
# Of all bodies together that are being read or are not answered yet: what a crowd of clients may make the server hold.
MAX_HELD_BYTES = 32 * MAX_BODY_BYTES
MAX_LABEL_LENGTH = 128
# The ASGI scope's key under which a request's label stands.
_LABEL = "pointsman.label"
_NOT_IN_LABEL = re.compile(r"[^A-Za-z0-9._:/+=@,-]")


class RequestLabelMiddleware:
    """Echoes the client's X-Request-Id, or makes one. A label only: nothing inside is keyed by it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        label = clean_label(Headers(scope=scope).get("x-request-id", "")) or uuid.uuid4().hex
        scope[_LABEL] = label

        async def send_labelled(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = label
            await send(message)

        await self._app(scope, receive, send_labelled)


class BodyLimitMiddleware:
    """Refuses bodies above a size, whether the client announces it or just sends, and bodies that are too many at once.

    Args:
        app: What answers.
        max_bytes: Of one body.
        max_held_bytes: Of all bodies whose answers have not begun.
    """

    def __init__(self, app: ASGIApp, max_bytes: int = MAX_BODY_BYTES, max_held_bytes: int = MAX_HELD_BYTES) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_held_bytes = max_held_bytes
        self._held_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        announced = Headers(scope=scope).get("content-length", "")
        if announced.isdigit() and (len(announced) > 18 or int(announced) > self._max_bytes):
            await build_error_response(self._too_large())(scope, receive, send)
            return
        num_bytes = num_held = 0

        def let_go() -> None:
            nonlocal num_held
            self._held_bytes -= num_held
            num_held = 0

        async def receive_counted() -> Message:
            nonlocal num_bytes, num_held
            message = await receive()
            size = len(message.get("body", b""))
            num_bytes, num_held = num_bytes + size, num_held + size
            self._held_bytes += size
            if num_bytes > self._max_bytes:
                raise self._too_large()
            if size and self._held_bytes > self._max_held_bytes and self._held_bytes > num_held:
                raise self._too_many()
            return message

        async def send_noted(message: Message) -> None:
            let_go()  # it has been read, and what was made of it is counted elsewhere
            await send(message)

        try:
            await self._app(scope, receive_counted, send_noted)
        finally:
            let_go()

    def _too_large(self) -> RequestError:
        message = f"The body is larger than {self._max_bytes} bytes, the most this server takes."
        return RequestError(message, kind=ErrorKind.BODY_TOO_LARGE)

    def _too_many(self) -> RequestError:
        message = f"The bodies in hand hold {self._max_held_bytes} bytes, the most this server takes; ask again soon."
        return RequestError(message, kind=ErrorKind.BODIES_TOO_MANY)


class LastCatchMiddleware:
    """Turns what no handler caught into a 500 of the usual shape; the traceback goes to the log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_started = False

        async def send_noted(message: Message) -> None:
            nonlocal has_started
            has_started = True
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        except Exception as error:
            if scope["type"] != "http" or has_started:
                raise
            await build_error_response(as_request_error(error))(scope, receive, send)


def get_label(scope: Scope) -> str:
    """Return what a request is called; empty where nobody named it."""
    return str(scope.get(_LABEL, ""))


def clean_label(text: str) -> str:
    """Return what of a client's request id may stand in a header and a log line."""
    return _NOT_IN_LABEL.sub("", text[:MAX_LABEL_LENGTH])
