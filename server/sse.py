"""Server-sent events as bytes. Pure: knows neither connections nor what the events mean."""

from __future__ import annotations

from typing import Any

from server.json_text import encode_json, encode_json_string

DONE = b"data: [DONE]\n\n"
# A comment line: clients skip it, proxies count it as traffic.
PING = b": ping\n\n"


# Line ends to Unicode, though not to the standard of events: many readers split there all the same.
_SEPARATORS = {"\u2028".encode(): rb"\u2028", "\u2029".encode(): rb"\u2029", "\u0085".encode(): rb"\u0085"}


def build_event(value: Any) -> bytes:
    """Return one event whose data is `value` as JSON, which never contains a line break of any kind."""
    return b"data: " + _escape_separators(encode_json(value)) + b"\n\n"


class TextEvent:
    """Events that differ in one text only: the bytes around it are made once.

    Args:
        value: One of them, with PLACEHOLDER for its text. No text after that may hold it.
    """

    PLACEHOLDER = "\ue000text\ue000"

    def __init__(self, value: Any) -> None:
        self._head, found, self._tail = build_event(value).rpartition(encode_json_string(self.PLACEHOLDER))
        assert found, "an event without its text"

    def build(self, text: str) -> bytes:
        """Return the event with this text, as build_event would."""
        return self._head + _escape_separators(encode_json_string(text)) + self._tail


def _escape_separators(data: bytes) -> bytes:
    if not data.isascii():
        for separator, escape in _SEPARATORS.items():
            data = data.replace(separator, escape)
    return data
