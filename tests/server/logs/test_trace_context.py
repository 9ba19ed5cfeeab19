from __future__ import annotations

import pytest

from server.logs.trace_context import TraceContext, parse_trace_context, read_trace_context

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"


def test_a_proper_parent_is_read() -> None:
    assert parse_trace_context(PARENT) == TraceContext(TRACE, SPAN, True)
    assert parse_trace_context(f"00-{TRACE}-{SPAN}-00") == TraceContext(TRACE, SPAN, False)
    # Flags that are not known yet change nothing.
    assert parse_trace_context(f"00-{TRACE}-{SPAN}-ff") == TraceContext(TRACE, SPAN, True)
    assert parse_trace_context(f" {PARENT} ") == TraceContext(TRACE, SPAN, True)


def test_a_later_version_may_say_more() -> None:
    assert parse_trace_context(f"01-{TRACE}-{SPAN}-01-more") == TraceContext(TRACE, SPAN, True)
    assert parse_trace_context(f"cc-{TRACE}-{SPAN}-01") == TraceContext(TRACE, SPAN, True)


@pytest.mark.parametrize(
    "parent",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01-more",
        f"01-{TRACE}-{SPAN}-01more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"00-{TRACE[:-1]}g-{SPAN}-01",
        f"00_{TRACE}_{SPAN}_01",
        f"00-{TRACE}-{SPAN}-01\n{PARENT}",
        "٠٠" + PARENT[2:],
    ],
)
def test_what_the_standard_does_not_allow_is_no_parent(parent: str) -> None:
    assert parse_trace_context(parent) is None


@pytest.mark.parametrize(
    ("state", "kept"),
    [("a=1,b=2", "a=1,b=2"), ("x" * 513, ""), ("a=\x01", ""), ("a=é", ""), ("", "")],
)
def test_the_state_is_passed_on_where_it_is_printable_and_short(state: str, kept: str) -> None:
    context = parse_trace_context(PARENT, state)
    assert context is not None and context.state == kept


def test_headers_are_read_as_asgi_has_them() -> None:
    headers = [(b"host", b"h"), (b"traceparent", PARENT.encode()), (b"tracestate", b"a=1"), (b"tracestate", b"b=2")]
    assert read_trace_context(headers) == TraceContext(TRACE, SPAN, True, "a=1,b=2")
    assert read_trace_context([(b"host", b"h")]) is None
    assert read_trace_context([(b"traceparent", b"\xff\xfe")]) is None
    assert read_trace_context([(b"traceparent", PARENT.encode())] * 2) is None, "two parents are none"
