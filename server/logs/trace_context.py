"""W3C trace context: which trace a request belongs to, as its client says. Pure: headers in, ids out.

Source: https://www.w3.org/TR/trace-context/, sections 3.2 and 3.3.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_FORBIDDEN_VERSION = "ff"
_SAMPLED = 0x01
# What the standard wants passed on at least.
_MAX_STATE_CHARS = 512


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The span that a request comes from.

    Attributes:
        trace_id: 32 hexadecimal digits, not all zero.
        span_id: 16 of them; likewise.
        is_sampled: Its maker records it.
        state: What tracing systems on the way have added; empty = nothing.
    """

    trace_id: str
    span_id: str
    is_sampled: bool
    state: str = ""


def read_trace_context(headers: Iterable[tuple[bytes, bytes]]) -> TraceContext | None:
    """Return the trace that an HTTP request belongs to; None where it names none, or not properly.

    Args:
        headers: Names in lower case, as ASGI has them.
    """
    parents = []
    states = []
    for name, value in headers:
        if name == b"traceparent":
            parents.append(value)
        elif name == b"tracestate":
            states.append(value)
    if len(parents) != 1:
        return None
    return parse_trace_context(parents[0].decode("latin-1"), b",".join(states).decode("latin-1"))


def parse_trace_context(parent: str, state: str = "") -> TraceContext | None:
    """Return what the two headers say; None where the first is none that the standard allows."""
    match = _TRACEPARENT.fullmatch(parent.strip())
    if match is None:
        return None
    version, trace_id, span_id, flags, rest = match.groups()
    # Later versions may say more behind what is known; this one may not.
    if version == _FORBIDDEN_VERSION or (version == "00" and rest):
        return None
    if not int(trace_id, 16) or not int(span_id, 16):
        return None
    is_sampled = bool(int(flags, 16) & _SAMPLED)
    kept = state if len(state) <= _MAX_STATE_CHARS and state.isascii() and state.isprintable() else ""
    return TraceContext(trace_id, span_id, is_sampled, kept)
