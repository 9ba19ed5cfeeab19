"""From an HTTP request to a wire type: content type, body, JSON, fields. Knows no endpoint."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request

from server.errors import ClientGoneError, ErrorKind, RequestError
from server.field_names import clean_field_name
from server.json_text import JSONTextError, decode_json

logger = logging.getLogger(__name__)

# Below this a body is parsed on the loop: it takes well under a millisecond, about what changing threads costs.
_MAX_INLINE_BYTES = 16 * 1024
# Names come from clients: the log must not grow with them.
_MAX_LOGGED_NAMES = 100
_MAX_UNKNOWN_NAMES = 100

W = TypeVar("W", covariant=True)


class FieldMetrics(Protocol):
    """The metrics that reading a request feeds."""

    def count_unknown_field(self, name: str) -> None:
        """Count a request field that no table knows."""


class WireParser(Protocol[W]):
    """protocol.parse_completion or its like."""

    def __call__(self, value: Any, *, is_strict: bool, on_unknown: Callable[[str], None]) -> W: ...


class RequestReader:
    """Reads bodies into wire types.

    Args:
        metrics: Told of unknown fields.
        is_strict: Refuse unknown fields.
    """

    def __init__(self, *, metrics: FieldMetrics, is_strict: bool = False) -> None:
        self._metrics = metrics
        self._is_strict = is_strict
        self._logged_names: set[str] = set()

    async def read(self, request: Request, parse: WireParser[W]) -> W:
        """Read and parse a request's body; a large one is parsed in a thread.

        Raises:
            RequestError: Not JSON, or `parse` refuses it.
            ClientGoneError: The client left while it was sending.
        """
        _check_content_type(request)
        _check_content_encoding(request)
        try:
            body = await request.body()
        except ClientDisconnect:
            raise ClientGoneError from None
        unknown: set[str] = set()
        try:
            if len(body) <= _MAX_INLINE_BYTES:
                return self._parse(body, parse, unknown)
            return await asyncio.to_thread(self._parse, body, parse, unknown)
        finally:
            for name in unknown:
                self._note_unknown(name)

    def _parse(self, body: bytes, parse: WireParser[W], unknown: set[str]) -> W:
        try:
            value = decode_json(body)
        except JSONTextError as error:
            raise RequestError(str(error), kind=ErrorKind.MALFORMED_BODY) from None

        def note(name: str) -> None:
            # 100,000 of them in one body would hold the loop for a quarter of a second, once it counts them.
            if len(unknown) < _MAX_UNKNOWN_NAMES:
                unknown.add(name)

        return parse(value, is_strict=self._is_strict, on_unknown=note)

    def _note_unknown(self, name: str) -> None:
        self._metrics.count_unknown_field(name)
        name = clean_field_name(name)
        if name not in self._logged_names and len(self._logged_names) < _MAX_LOGGED_NAMES:
            self._logged_names.add(name)
            logger.warning("requests carry a field that is not known and is ignored: %s", name)


def _check_content_type(request: Request) -> None:
    # An absent header is fine, but a form's or text's is not: a browser sends those across sites without asking.
    sent = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if sent != "application/json" and not (sent.startswith("application/") and sent.endswith("+json")):
        raise RequestError(
            "The body must be JSON; send the header `Content-Type: application/json`.",
            kind=ErrorKind.UNSUPPORTED_MEDIA_TYPE,
        )


def _check_content_encoding(request: Request) -> None:
    # Else a compressed body would be called broken JSON, which sends its sender looking in the wrong place.
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("identity", ""):
        raise RequestError(
            "The body must come uncompressed; leave out the header `Content-Encoding`.",
            kind=ErrorKind.UNSUPPORTED_MEDIA_TYPE,
        )
