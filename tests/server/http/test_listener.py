import socket
import sys

import pytest

from server.http.h11_parser import TimedH11Protocol
from server.http.listener import ListenError, bind, create_http_server, listen
from server.http.parser import LimitedHttpToolsProtocol


def test_a_bound_port_answers_only_once_it_listens() -> None:
    with bind("127.0.0.1", 0) as sock:
        address = sock.getsockname()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address)
        listen(sock)
        socket.create_connection(address).close()


def test_a_taken_port_is_named() -> None:
    with bind("127.0.0.1", 0) as first:
        listen(first)
        port = first.getsockname()[1]
        with pytest.raises(ListenError, match=rf"Port {port} on 127\.0\.0\.1 is taken.*--port"):
            bind("127.0.0.1", port)


def test_of_two_that_bound_the_same_port_the_second_to_listen_is_told() -> None:
    with bind("127.0.0.1", 0) as first, bind("127.0.0.1", first.getsockname()[1]) as second:
        listen(first)
        with pytest.raises(ListenError, match="is taken"):
            listen(second)


@pytest.mark.parametrize(
    ("host", "complaint"),
    [("192.0.2.1", "not an address of this machine"), ("no.such.host.invalid", "is unknown")],
)
def test_a_host_that_is_not_here_is_named(host: str, complaint: str) -> None:
    with pytest.raises(ListenError, match=complaint):
        bind(host, 0)


def test_brackets_around_an_ipv6_address_are_taken() -> None:
    with bind("[::1]", 0) as sock:
        assert sock.family is socket.AF_INET6


async def never_called(scope: object, receive: object, send: object) -> None:
    raise AssertionError


def never_told(status: int) -> None:
    raise AssertionError


async def test_http_is_spoken_by_the_fast_parser_and_loop() -> None:
    server = create_http_server(never_called, grace_s=3, on_refusal=never_told)
    server.config.load()
    assert server.config.http_protocol_class.func is LimitedHttpToolsProtocol
    factory = server.config.get_loop_factory()
    assert factory is not None
    assert factory.__module__ == "uvloop"


async def test_without_httptools_http_is_spoken_by_h11_and_the_log_says_so_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "httptools", None)
    server = create_http_server(never_called, grace_s=3, on_refusal=never_told)
    server.config.load()
    assert server.config.http_protocol_class.func is TimedH11Protocol
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "pip install httptools" in record.getMessage()


def test_our_parser_is_not_given_up_in_silence_where_uvicorn_has_moved_what_it_stands_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "server.http.parser", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn.protocols.http.httptools_impl", None)
    with pytest.raises(ImportError, match="httptools_impl"):
        create_http_server(never_called, grace_s=3, on_refusal=never_told)
