"""JSON between bytes and values: what a body may be, and what leaves. Knows nothing of HTTP or of any field.

Decoding must hold the interpreter for a short time only, whatever the bytes are, because other threads wait for it.
"""

from __future__ import annotations

import io
import json
import re
from json.encoder import encode_basestring
from typing import Any

from pydantic_core import from_json

# Measured on one core of a server CPU, cyclic garbage collection included: 2 M numbers take 90 ms to decode, 100 k
# containers or keys up to 120 ms. /health has to answer within 250 ms meanwhile.
MAX_JSON_SEPARATORS = 2_000_000
MAX_JSON_CONTAINERS_AND_STRINGS = 100_000
_COUNT_ABOVE_BYTES = 256 * 1024
_TOO_MANY = "The body holds too many JSON values; send fewer, or send text instead of token ids."

_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))

_SURROGATE = re.compile("[\ud800-\udfff]")
_ENCODED_SURROGATE = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
_PAIR = rb"u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
_ESCAPE = re.compile(rb"\\(?:" + _PAIR + rb"|(u[dD][89a-fA-F][0-9a-fA-F]{2})|.)", re.S)


class JSONTextError(ValueError):
    """The bytes are not JSON that this server takes. The message is a sentence."""


def decode_json(body: bytes) -> Any:
    """Decode a body; lone surrogates become U+FFFD, wherever and however they were written.

    Raises:
        JSONTextError: Not JSON, nested too deeply, NaN or Infinity, or far too many values.
    """
    if len(body) > _COUNT_ABOVE_BYTES:
        _check_size(body)
    try:
        return from_json(body, allow_inf_nan=False)
    except ValueError as error:
        repaired = _replace_lone_surrogates(body)
        if repaired == body:
            raise JSONTextError(_describe(error, body)) from None
    try:
        return from_json(repaired, allow_inf_nan=False)
    except ValueError as error:
        raise JSONTextError(_describe(error, body)) from None


def encode_json(value: Any) -> bytes:
    """Encode as compact UTF-8; a lone surrogate leaves as U+FFFD."""
    return scrub_surrogates(_ENCODER.encode(value)).encode()


def encode_json_string(text: str) -> bytes:
    """Encode as encode_json does, only faster."""
    return encode_basestring(scrub_surrogates(text)).encode()


def encode_long_json(value: Any) -> bytes:
    """Encode as encode_json does, more slowly, letting other threads run meanwhile: one call would hold them all."""
    # Not b"".join: it keeps all pieces, 30 M for the longest text's tokens, and then walks them in one go, seconds in
    # which nobody else runs.
    body = io.BytesIO()
    for piece in _ENCODER.iterencode(value):
        body.write(scrub_surrogates(piece).encode())
    return body.getvalue()


def scrub_surrogates(text: str) -> str:
    """Replace lone surrogates by U+FFFD, one for one."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


def _check_size(body: bytes) -> None:
    # Plain bytes methods, each a few milliseconds: first the escapes go, so that every quote left opens or closes.
    plain = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    num_strings = plain.count(b'"') // 2
    if num_strings > MAX_JSON_CONTAINERS_AND_STRINGS:
        raise JSONTextError(_TOO_MANY)
    outside = b"".join(plain.split(b'"')[::2])
    num_containers = outside.count(b"[") + outside.count(b"{")
    if num_strings + num_containers > MAX_JSON_CONTAINERS_AND_STRINGS or outside.count(b",") > MAX_JSON_SEPARATORS:
        raise JSONTextError(_TOO_MANY)


def _replace_lone_surrogates(body: bytes) -> bytes:
    # Bytes ED A0..BF never occur in valid UTF-8, so the first replacement cannot hit anything else.
    body = _ENCODED_SURROGATE.sub("\ufffd".encode(), body)
    return _ESCAPE.sub(lambda match: rb"\ufffd" if match[1] else match[0], body)


def _describe(error: ValueError, body: bytes) -> str:
    hint = " NaN and Infinity are not JSON." if b"NaN" in body or b"Infinity" in body else ""
    return f"The body is not valid JSON: {error}.{hint}"
