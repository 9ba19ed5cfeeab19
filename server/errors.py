"""What goes wrong with a request, and the ONE table of how it is told: status, type, code.

Exception
├── RequestError           this request is refused or has failed; becomes {"error": {...}}
├── ClientGoneError        the client has left; there is nobody to tell
├── ServerStoppingError    this process ends before the answer does; becomes RequestError(kind=aborted)
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

from engine_core import EngineDeadError
from server.json_text import encode_json

logger = logging.getLogger(__name__)


class ErrorKind(enum.StrEnum):
    """What went wrong, in our words."""

    MALFORMED_REQUEST = "malformed_request"
    HEADERS_TOO_LARGE = "headers_too_large"
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
    UNSUPPORTED_MEDIA_TYPE = "unsupported_media_type"
    INTERNAL = "internal"
    NOT_READY = "not_ready"
    TOO_MANY_VIEWERS = "too_many_viewers"
    ENGINE_DEAD = "engine_dead"
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

ERROR_TABLE: Mapping[ErrorKind, ErrorReply] = {
    ErrorKind.MALFORMED_REQUEST: ErrorReply(400, _CLIENT, "malformed_request"),
    ErrorKind.HEADERS_TOO_LARGE: ErrorReply(431, _CLIENT, "headers_too_large"),
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
    ErrorKind.TOO_MANY_VIEWERS: ErrorReply(503, _UNAVAILABLE, "too_many_viewers", retry_after_s=10),
    ErrorKind.ENGINE_DEAD: ErrorReply(503, _UNAVAILABLE, "engine_dead"),
    ErrorKind.ABORTED: ErrorReply(503, _UNAVAILABLE, "aborted", retry_after_s=1),
}


class RequestError(Exception):
    """A request that is refused or has failed.

    Attributes:
        message: A sentence for the client that says what to change.
        kind: Row of ERROR_TABLE.
        param: The field at fault, such as ``messages[0].role``.
    """

    def __init__(self, message: str, *, kind: ErrorKind, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.kind = kind
        self.param = param

    @property
    def reply(self) -> ErrorReply:
        return ERROR_TABLE[self.kind]


class ClientGoneError(Exception):
    """The client closed its connection before it had its answer."""


class ServerStoppingError(Exception):
    """The server was told to stop; the message says so to the client."""


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
        case HTTPException():
            return _from_http_exception(error)
    logger.error("unhandled error", exc_info=error)
    return RequestError("The server failed on this request; its log says why.", kind=ErrorKind.INTERNAL)


def build_error_body(error: RequestError) -> dict[str, Any]:
    """Return OpenAI's error object, all four keys always present."""
    reply = error.reply
    return {"error": {"message": error.message, "type": reply.type, "param": error.param, "code": reply.code}}


def build_error_response(error: RequestError, headers: Mapping[str, str] | None = None) -> Response:
    """Return the HTTP reply for an error."""
    reply = error.reply
    all_headers = dict(headers or {})
    if reply.retry_after_s is not None:
        all_headers["Retry-After"] = str(reply.retry_after_s)
    if reply.is_final:
        all_headers["x-should-retry"] = "false"
    if error.kind is ErrorKind.BODY_TOO_LARGE:
        # The rest of the body is not read, so the connection cannot carry another request.
        all_headers["Connection"] = "close"
    body = encode_json(build_error_body(error))
    return Response(body, status_code=reply.status, headers=all_headers, media_type="application/json")


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
