"""What goes wrong with a request, and the ONE table of how it is told: status, type, code.

Exception
├── RequestError           this request is refused or has failed; becomes {"error": {...}}
├── ClientGoneError        the client has left; there is nobody to tell
├── ServerStoppingError    this process ends before the answer does; becomes RequestError(kind=aborted)
├── EngineStuckError       a step does not come to an end, but this process will; RequestError(kind=engine_stuck)
└── EngineDeadError        engine_core's; becomes RequestError(kind=engine_dead)
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine_core import EngineDeadError
from server.json_text import encode_json
from server.logs.http_record import ErrorNote, note_error

logger = logging.getLogger(__name__)

# Nobody reads it: the client has left. The number is what access logs call that.
STATUS_CLIENT_GONE = 499


class ErrorKind(enum.StrEnum):
    """What went wrong, in our words."""

    MALFORMED_REQUEST = "malformed_request"
    HEADERS_TOO_LARGE = "headers_too_large"
    SLOW_REQUEST = "slow_request"
    INVALID_API_KEY = "invalid_api_key"
    INSUFFICIENT_SCOPE = "insufficient_scope"
    ORIGIN_NOT_ALLOWED = "origin_not_allowed"
    HOST_NOT_ALLOWED = "host_not_allowed"
    MALFORMED_BODY = "malformed_body"
    INVALID_VALUE = "invalid_value"
    MISSING_PARAMETER = "missing_parameter"
    UNKNOWN_PARAMETER = "unknown_parameter"
    UNSUPPORTED_PARAMETER = "unsupported_parameter"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    MODEL_NOT_FOUND = "model_not_found"
    NOT_FOUND = "not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    BODY_TOO_LARGE = "body_too_large"
    BODIES_TOO_MANY = "bodies_too_many"
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    INTERNAL = "internal"
    NOT_READY = "not_ready"
    DRAINING = "draining"
    QUEUE_FULL = "queue_full"
    QUEUE_TIMEOUT = "queue_timeout"
    RATE_LIMITED = "rate_limited"
    REQUEST_TIMEOUT = "request_timeout"
    CANCELLED = "cancelled"
    TOO_MANY_VIEWERS = "too_many_viewers"
    ENGINE_DEAD = "engine_dead"
    ENGINE_STUCK = "engine_stuck"
    ABORTED = "aborted"


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """How a kind is told.

    Attributes:
        status: HTTP status.
        type: OpenAI's class of error.
        code: What programs test for.
        retry_after_s: Seconds for the Retry-After header, None = no header.
        is_final: Trying again brings the same, though OpenAI's clients would do so at this status.
    """

    status: int
    type: str
    code: str
    retry_after_s: int | None = None
    is_final: bool = False


_CLIENT, _SERVER, _UNAVAILABLE = "invalid_request_error", "server_error", "service_unavailable_error"
_RATE = "rate_limit_error"

ERROR_TABLE: Mapping[ErrorKind, ErrorReply] = {
    ErrorKind.MALFORMED_REQUEST: ErrorReply(400, _CLIENT, "malformed_request"),
    ErrorKind.HEADERS_TOO_LARGE: ErrorReply(431, _CLIENT, "headers_too_large"),
    ErrorKind.SLOW_REQUEST: ErrorReply(408, _CLIENT, "slow_request"),
    ErrorKind.INVALID_API_KEY: ErrorReply(401, _CLIENT, "invalid_api_key"),
    ErrorKind.INSUFFICIENT_SCOPE: ErrorReply(403, _CLIENT, "insufficient_scope"),
    ErrorKind.ORIGIN_NOT_ALLOWED: ErrorReply(403, _CLIENT, "origin_not_allowed"),
    ErrorKind.HOST_NOT_ALLOWED: ErrorReply(421, _CLIENT, "host_not_allowed"),
    ErrorKind.MALFORMED_BODY: ErrorReply(400, _CLIENT, "malformed_body"),
    ErrorKind.INVALID_VALUE: ErrorReply(400, _CLIENT, "invalid_value"),
    ErrorKind.MISSING_PARAMETER: ErrorReply(400, _CLIENT, "missing_required_parameter"),
    ErrorKind.UNKNOWN_PARAMETER: ErrorReply(400, _CLIENT, "unknown_parameter"),
    ErrorKind.UNSUPPORTED_PARAMETER: ErrorReply(400, _CLIENT, "unsupported_parameter"),
    ErrorKind.CONTEXT_LENGTH_EXCEEDED: ErrorReply(400, _CLIENT, "context_length_exceeded"),
    ErrorKind.MODEL_NOT_FOUND: ErrorReply(404, _CLIENT, "model_not_found"),
    ErrorKind.NOT_FOUND: ErrorReply(404, _CLIENT, "not_found"),
    ErrorKind.METHOD_NOT_ALLOWED: ErrorReply(405, _CLIENT, "method_not_allowed"),
    ErrorKind.BODY_TOO_LARGE: ErrorReply(413, _CLIENT, "body_too_large"),
    ErrorKind.UNSUPPORTED_MEDIA_TYPE: ErrorReply(415, _CLIENT, "unsupported_media_type"),
    ErrorKind.INTERNAL: ErrorReply(500, _SERVER, "internal_error", is_final=True),
    ErrorKind.NOT_READY: ErrorReply(503, _UNAVAILABLE, "not_ready", retry_after_s=2),
    ErrorKind.DRAINING: ErrorReply(503, _UNAVAILABLE, "draining", retry_after_s=2),
    ErrorKind.BODIES_TOO_MANY: ErrorReply(503, _UNAVAILABLE, "bodies_too_many", retry_after_s=2),
    # Those that were refused for load say themselves when to come back.
    ErrorKind.QUEUE_FULL: ErrorReply(503, _UNAVAILABLE, "queue_full", retry_after_s=1),
    ErrorKind.QUEUE_TIMEOUT: ErrorReply(503, _UNAVAILABLE, "queue_timeout", retry_after_s=1),
    ErrorKind.RATE_LIMITED: ErrorReply(429, _RATE, "rate_limit_exceeded", retry_after_s=1),
    # Not a 5xx, nor a 408: routers would have other workers take as long in vain.
    ErrorKind.REQUEST_TIMEOUT: ErrorReply(400, _CLIENT, "request_timeout"),
    ErrorKind.CANCELLED: ErrorReply(409, _CLIENT, "request_cancelled", is_final=True),
    ErrorKind.TOO_MANY_VIEWERS: ErrorReply(503, _UNAVAILABLE, "too_many_viewers", retry_after_s=10),
    ErrorKind.ENGINE_DEAD: ErrorReply(503, _UNAVAILABLE, "engine_dead"),
    ErrorKind.ENGINE_STUCK: ErrorReply(503, _UNAVAILABLE, "engine_stuck", retry_after_s=5),
    ErrorKind.ABORTED: ErrorReply(503, _UNAVAILABLE, "aborted", retry_after_s=1),
}

# After these a connection carries no other request: the rest of the body is not read, or nobody will answer here.
_CLOSING = frozenset({ErrorKind.BODY_TOO_LARGE, ErrorKind.BODIES_TOO_MANY, ErrorKind.DRAINING, ErrorKind.ENGINE_STUCK})


class RequestError(Exception):
    """A request that is refused or has failed.

    Attributes:
        message: A sentence for the client that says what to change.
        kind: Row of ERROR_TABLE.
        param: The field at fault, such as ``messages[0].role``.
        retry_after_s: Seconds after which to ask again, the row's unless given; None = nothing is said of it.
    """

    def __init__(
        self, message: str, *, kind: ErrorKind, param: str | None = None, retry_after_s: int | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind
        self.param = param
        self.retry_after_s = ERROR_TABLE[kind].retry_after_s if retry_after_s is None else retry_after_s

    @property
    def reply(self) -> ErrorReply:
        return ERROR_TABLE[self.kind]

    @property
    def note(self) -> ErrorNote:
        """What the log tells of it: no word of the message, which may quote its request."""
        return ErrorNote(self.reply.code, self.reply.status, self.param)


class ClientGoneError(Exception):
    """The client closed its connection before it had its answer."""


class ServerStoppingError(Exception):
    """The server was told to stop; the message says so to the client."""


class EngineStuckError(Exception):
    """A step of the engine does not come to an end; the message says so to the client."""


def as_request_error(error: Exception) -> RequestError:
    """Return what the client is told about any exception; what nobody foresaw is logged and hidden behind a 500."""
    match error:
        case RequestError():
            return error
        case EngineDeadError():
            message = "The engine has stopped and will not answer; restart the server."
            return RequestError(message, kind=ErrorKind.ENGINE_DEAD)
        case ServerStoppingError():
            return RequestError(str(error), kind=ErrorKind.ABORTED)
        case EngineStuckError():
            return RequestError(str(error), kind=ErrorKind.ENGINE_STUCK)
        case HTTPException():
            return _from_http_exception(error)
    logger.error("unhandled error", exc_info=error)
    return RequestError("The server failed on this request; its log says why.", kind=ErrorKind.INTERNAL)


def build_error_body(error: RequestError) -> dict[str, Any]:
    """Return OpenAI's error object, all four keys always present."""
    reply = error.reply
    return {"error": {"message": error.message, "type": reply.type, "param": error.param, "code": reply.code}}


class ErrorResponse(Response):
    """The HTTP reply for an error. Whoever sends it also has it noted for the log.

    Args:
        error: What is told.
        headers: Of the reply.
    """

    def __init__(self, error: RequestError, headers: Mapping[str, str]) -> None:
        body = encode_json(build_error_body(error))
        super().__init__(body, status_code=error.reply.status, headers=headers, media_type="application/json")
        self._note = error.note

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        note_error(scope, self._note)
        await super().__call__(scope, receive, send)


def build_error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    """Return the HTTP reply for an error."""
    reply = error.reply
    all_headers = dict(headers or {})
    if error.retry_after_s is not None:
        all_headers["Retry-After"] = str(error.retry_after_s)
    if reply.is_final:
        all_headers["x-should-retry"] = "false"
    if error.kind in _CLOSING:
        all_headers["Connection"] = "close"
    return ErrorResponse(error, all_headers)


def _from_http_exception(error: HTTPException) -> RequestError:
    match error.status_code:
        case 404:
            return RequestError("There is nothing at this path; /docs lists what there is.", kind=ErrorKind.NOT_FOUND)
        case 405:
            message = "This path does not take this method; the Allow header lists those it takes."
            return RequestError(message, kind=ErrorKind.METHOD_NOT_ALLOWED)
        case status if status < 500:
            return RequestError(f"{error.detail}.", kind=ErrorKind.INVALID_VALUE)
    return RequestError("The server failed on this request; its log says why.", kind=ErrorKind.INTERNAL)
