"""Server-sent events as bytes. Pure: knows neither connections nor what the events mean."""

from __future__ import annotations

from typing import Any

from server.json_text import encode_json

DONE = b"data: [DONE]\n\n"
# A comment line: clients skip it, proxies count it as traffic.
PING = b": ping\n\n"


def build_event(value: Any) -> bytes:
    """Return one event whose data is `value` as JSON, which never contains a line break."""
    return b"data: " + encode_json(value) + b"\n\n"
