from __future__ import annotations

import pytest

from server.bench.response_reader import EventReader, ResponseError, ResponseReader
from tests.server.bench.stub_server import END, HEAD, chunk

BODY = b'data: {"a": 1}\n\ndata: {"b": 2}\r\n\r\n: ping\n\nevent: x\ndata: one\ndata: two\n\ndata:[DONE]\n\ndata: cut'
EVENTS = [b'{"a": 1}', b'{"b": 2}', b"one\ntwo", b"[DONE]"]


def cut(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


def chunked(size: int) -> bytes:
    return HEAD + b"".join(map(chunk, cut(BODY, size))) + END


@pytest.mark.parametrize("chunk_size", [1, 2, 7, 1000])
@pytest.mark.parametrize("read_size", [1, 2, 3, 5, 64, 10_000])
def test_the_body_is_the_same_however_it_is_cut(chunk_size: int, read_size: int) -> None:
    reader = ResponseReader()
    body = b"".join(map(reader.feed, cut(chunked(chunk_size), read_size)))
    assert (reader.status, reader.is_complete, body) == (200, True, BODY)


def test_a_response_may_be_split_at_any_byte() -> None:
    data = chunked(9)
    for at in range(len(data)):
        reader = ResponseReader()
        assert (reader.feed(data[:at]) + reader.feed(data[at:]), reader.is_complete) == (BODY, True), at


def test_events_may_be_split_at_any_byte() -> None:
    for at in range(len(BODY)):
        reader = EventReader()
        assert reader.feed(BODY[:at]) + reader.feed(BODY[at:]) == EVENTS, at


def test_an_event_is_told_as_soon_as_it_is_complete() -> None:
    reader = EventReader()
    assert reader.feed(b"data: 1\n") == []
    assert reader.feed(b"\ndata: 2") == [b"1"]


def test_a_body_of_given_length_ends_there() -> None:
    reader = ResponseReader()
    assert reader.feed(b"HTTP/1.1 404 Not Found\r\nContent-Length: 4\r\n\r\nab") == b"ab"
    assert not reader.is_complete
    assert reader.feed(b"cdef") == b"cd"
    assert (reader.status, reader.is_complete) == (404, True)


def test_an_empty_body_is_complete_with_its_head() -> None:
    reader = ResponseReader()
    assert reader.feed(b"HTTP/1.1 204 No Content\r\nContent-Length: 0\r\n\r\n") == b""
    assert reader.is_complete


def test_a_body_of_unknown_length_goes_on_until_the_connection_ends() -> None:
    reader = ResponseReader()
    assert reader.feed(b"HTTP/1.1 200 OK\r\n\r\nab") == b"ab"
    assert reader.feed(b"cd") == b"cd"
    assert not reader.is_complete


def test_a_chunk_size_may_have_an_extension() -> None:
    reader = ResponseReader()
    assert reader.feed(HEAD + b"2;x=y\r\nab\r\n" + END) == b"ab"


@pytest.mark.parametrize(
    ("data", "complaint"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n\r\n", "does not begin like HTTP/1.1"),
        (b"HTTP/1.1\r\n\r\n", "does not begin like HTTP/1.1"),
        (b"HTTP/1.1 2x0 OK\r\n\r\n", "does not begin like HTTP/1.1"),
        (b"x" * 70_000, "head does not end"),
        (HEAD + b"zz\r\n", "size is no number"),
        (HEAD + b"1" * 2_000, "size does not end"),
    ],
)
def test_what_is_no_http_is_told(data: bytes, complaint: str) -> None:
    with pytest.raises(ResponseError, match=complaint):
        ResponseReader().feed(data)
