from __future__ import annotations

import json

import pytest

from server.bench.target import BenchError, Target, parse_target


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("http://127.0.0.1:8000", Target("127.0.0.1", 8000)),
        ("http://127.0.0.1:8000/v1/", Target("127.0.0.1", 8000)),
        ("http://example.test/llm/v1", Target("example.test", 80, "/llm")),
        ("http://[::1]:9", Target("::1", 9)),
    ],
)
def test_a_base_url_may_end_in_v1(url: str, target: Target) -> None:
    assert parse_target(url) == target


def test_the_url_for_messages_has_brackets_where_they_belong() -> None:
    assert parse_target("http://[::1]:9/llm/v1").url == "http://[::1]:9/llm"


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("https://api.example.test", "is https"),
        ("127.0.0.1:8000", "must begin with http://"),
        ("http://", "must begin with http://"),
        ("http://host:port", "does not parse"),
        ("http://[::1", "does not parse"),
    ],
)
def test_what_is_no_address_is_told(url: str, complaint: str) -> None:
    with pytest.raises(BenchError, match=complaint):
        parse_target(url)


def test_a_key_that_would_break_the_header_is_refused() -> None:
    with pytest.raises(BenchError, match="--api-key"):
        parse_target("http://host", "key\r\nX: y")


def test_a_request_is_complete_http() -> None:
    head, _, body = Target("h", 1, "/p", "secret").build_post("/v1/completions", {"prompt": "é"}).partition(b"\r\n\r\n")
    assert head.split(b"\r\n") == [
        b"POST /p/v1/completions HTTP/1.1",
        b"Host: h:1",
        b"Connection: close",
        b"Authorization: Bearer secret",
        b"Content-Type: application/json",
        b"Content-Length: 16",
    ]
    assert json.loads(body) == {"prompt": "é"}


def test_without_a_key_there_is_no_such_header() -> None:
    assert (
        Target("h", 1).build_get("/v1/models") == b"GET /v1/models HTTP/1.1\r\nHost: h:1\r\nConnection: close\r\n\r\n"
    )
