"""One line of OpenAI's batch format, in and out. Pure.

In: {"custom_id": ..., "method": "POST", "url": "/v1/...", "body": {...}}.
Out: {"id": ..., "custom_id": ..., "response": {"status_code", "request_id", "body"} or null, "error": null or {...}}.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from server.generation import GENERATING_PATHS
from server.json_text import JSONTextError, decode_json, encode_json

_MAX_SHOWN_CHARS = 60


@dataclass(frozen=True, slots=True)
class BatchItem:
    """A line that can be run.

    Attributes:
        custom_id: The client's name for it.
        url: One of GENERATING_PATHS.
        body: The request, encoded.
    """

    custom_id: str
    url: str
    body: bytes


class BatchLineError(Exception):
    """A line that cannot be run.

    Attributes:
        code: For programs.
        message: A sentence that says what to change.
        custom_id: The line's, where it has one.
    """

    def __init__(self, code: str, message: str, custom_id: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.custom_id = custom_id


def parse_line(text: bytes) -> BatchItem:
    """Return what a line asks for.

    Raises:
        BatchLineError: It is no JSON object, lacks a key, or asks for what a batch cannot do.
    """
    try:
        value = decode_json(text)
    except JSONTextError as error:
        raise BatchLineError("invalid_json", str(error).replace("The body", "The line", 1)) from None
    if not isinstance(value, dict):
        raise BatchLineError("invalid_line", "The line must be a JSON object with custom_id, method, url and body.")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise BatchLineError("invalid_line", "`custom_id` must be a string that names this line.")
    _check_target(value, custom_id)
    try:
        return BatchItem(custom_id, value["url"], encode_json(value["body"]))
    except ValueError:  # 1e999, say: JSON may be written so, but no double holds it
        message = "`body` holds a number that is too large; send one that fits into a double."
        raise BatchLineError("invalid_body", message, custom_id) from None


def build_answer(line_id: str, custom_id: str, *, status: int, request_id: str | None, body: Any) -> bytes:
    """Return the output line, without a line end, of a request that was run.

    Args:
        line_id: Unique among output lines.
        custom_id: The input line's.
        status: HTTP status of the answer.
        request_id: The answer's X-Request-Id.
        body: The answer, decoded.
    """
    response = {"status_code": status, "request_id": request_id, "body": body}
    return encode_json({"id": line_id, "custom_id": custom_id, "response": response, "error": None})


def build_refusal(line_id: str, number: int, error: BatchLineError) -> bytes:
    """Return the output line, without a line end, of a line that was not run, or whose answer the engine owes.

    Args:
        line_id: Unique among output lines.
        number: The input line's place, from 1; its custom_id may be what is wrong with it.
        error: Why.
    """
    told = {"code": error.code, "message": error.message, "line": number}
    return encode_json({"id": line_id, "custom_id": error.custom_id, "response": None, "error": told})


def _check_target(value: dict[str, Any], custom_id: str) -> None:
    if value.get("method") != "POST":
        raise BatchLineError("invalid_method", '`method` must be "POST".', custom_id)
    url, body = value.get("url"), value.get("body")
    if url not in GENERATING_PATHS:
        message = f"`url` must be one of {', '.join(GENERATING_PATHS)}, not {str(url)[:_MAX_SHOWN_CHARS]!r}."
        raise BatchLineError("invalid_url", message, custom_id)
    if not isinstance(body, dict):
        raise BatchLineError("invalid_body", "`body` must be an object: the request that would be posted.", custom_id)
    if body.get("stream"):
        raise BatchLineError("stream_not_supported", "A batch has no streams: leave `stream` out.", custom_id)
