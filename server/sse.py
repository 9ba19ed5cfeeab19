"""Server-sent events as bytes. Pure: knows neither connections nor what the events mean."""

from __future__ import annotations

from typing import Any

from server.json_text import encode_json

DONE = b"data: [DONE]\n\n"
# A comment line: clients skip it, proxies count it as traffic.
PING = b": ping\n\n"


# Line ends to Unicode, though not to the standard of events: many readers split there all the same.
_SEPARATORS = {"\u2028".encode(): rb"\u2028", "\u2029".encode(): rb"\u2029", "\u0085".encode(): rb"\u0085"}


def build_event(value: Any) -> bytes:
    """Return one event whose data is `value` as JSON, which never contains a line break of any kind."""
    data = encode_json(value)
    if not data.isascii():
        for separator, escape in _SEPARATORS.items():
            data = data.replace(separator, escape)
    return b"data: " + data + b"\n\n"
