"""The container's own question, over real sockets: what it reads, what it makes of an answer, and what it says."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from server.healthcheck import main

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 15\r\n\r\n" + b'{"status":"ok"}'
LOADING = b'HTTP/1.1 503 Service Unavailable\r\n\r\n{"status":"loading","detail":"layer 3"}'


@contextmanager
def answering(answer: bytes, host: str = "127.0.0.1") -> Iterator[tuple[int, list[bytes]]]:
    """One connection is answered; yields the port and what was asked."""
    asked: list[bytes] = []
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, 0), family=family) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            with connection:
                asked.append(connection.recv(4096))
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        yield listening.getsockname()[1], asked
        thread.join(10)


@pytest.mark.parametrize(
    ("arguments", "answer", "code", "said"),
    [
        ([], OK, 0, '/health answers 200: {"status":"ok"}'),
        (["/ready"], OK, 0, '/ready answers 200: {"status":"ok"}'),
        (["/ready"], LOADING, 1, '/ready answers 503: {"status":"loading","detail":"layer 3"}'),
        ([], b"HTTP/1.1 401 Unauthorized\r\n\r\n", 1, "/health answers 401: "),
        ([], b"SSH-2.0-OpenSSH\r\n", 1, "/health does not answer: no HTTP, but 'SSH-2.0-OpenSSH\\r\\n'"),
        ([], b"", 1, "/health does not answer: no HTTP, but ''"),
    ],
)
def test_only_200_is_healthy(
    arguments: list[str], answer: bytes, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with answering(answer) as (port, asked):
        assert main(arguments, {"POINTSMAN_PORT": str(port)}) == code
    assert capsys.readouterr().out == said + "\n"
    path = arguments[0] if arguments else "/health"
    assert asked[0].startswith(f"GET {path} HTTP/1.1\r\nHost: localhost:{port}\r\n".encode())


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "localhost", ""])
def test_a_server_of_every_address_is_reached_at_one(host: str) -> None:
    with answering(OK) as (port, _):
        assert main([], {"POINTSMAN_HOST": host, "POINTSMAN_PORT": str(port)}) == 0


@pytest.mark.parametrize("host", ["::", "[::]", "::1"])
def test_so_is_one_of_every_ipv6_address(host: str) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("this machine has no IPv6")
    with answering(OK, "::1") as (port, _):
        assert main([], {"POINTSMAN_HOST": host, "POINTSMAN_PORT": str(port)}) == 0


def test_nobody_there_and_no_port_are_unhealthy_with_a_reason(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    assert main([], {"POINTSMAN_PORT": str(port)}) == 1
    assert "refused" in capsys.readouterr().out
    assert main([], {"POINTSMAN_PORT": "tcp://10.0.0.1:8000"}) == 1
    assert "tcp://10.0.0.1:8000" in capsys.readouterr().out


def test_it_imports_next_to_nothing() -> None:
    script = "import sys, server.healthcheck; print(*sorted(sys.modules))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = set(result.stdout.split())
    assert "server.healthcheck" in loaded
    assert not loaded & {"engine_core", "server.config", "argparse", "asyncio", "http.client", "urllib.request", "ssl"}
