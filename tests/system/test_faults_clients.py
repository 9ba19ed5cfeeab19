"""Clients that misbehave: who never read, close half a connection, send far too much, or take every socket."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import pytest

from tests.e2e.raw_http import build_request, iter_chunked, send
from tests.e2e.server_process import ServerProcess
from tests.system.clients import (
    COMPLETIONS,
    PeakMemory,
    Stream,
    ask,
    open_stream,
    read_stream,
    resident_kib,
    wait_until_quiet,
)

FLAGS = ("--num-kv-blocks", "256", "--max-num-seqs", "16", "--stream-write-timeout-s", "3")
THREE_HUNDRED_MB = 300 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with ServerProcess(*FLAGS) as process:
        read_stream(process.url, ask(8))
        yield process


class Prober:
    """Asks /health all the while; remembers the longest wait."""

    def __init__(self, server: ServerProcess) -> None:
        self.longest_s = 0.0
        self._url = server.url + "/health"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Prober:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        with httpx.Client() as client:
            while not self._over.wait(0.02):
                started = time.monotonic()
                assert client.get(self._url, timeout=30).status_code == 200
                self.longest_s = max(self.longest_s, time.monotonic() - started)


def test_readers_who_never_read_are_cut_and_cost_little(server: ServerProcess) -> None:
    num_ended = server.metric("vllm:request_success_total")
    # Twenty alternatives make each token some 3 KB of answer: the buffers are full long before the end.
    deaf = ask(3000, messages=[{"role": "user", "content": "Nobody reads this."}], logprobs=True, top_logprobs=20)
    del deaf["prompt"]
    before_kib = resident_kib(server.process.pid)
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(open_stream(server, deaf, "/v1/chat/completions", receive_bytes=4096))
        server.wait_until(lambda: server.metric("vllm:num_requests_running") == 4, 30)
        beside = Stream(server.url, ask(40))
        with PeakMemory(server.process.pid) as peak:
            server.wait_until(lambda: server.metric("vllm:num_requests_running") == 0, 240)
        assert beside.wait().finish_reason == "length", "a reader who reads is not held up"
    wait_until_quiet(server)
    assert server.metric("vllm:request_success_total") == num_ended + 5
    assert peak.growth_kib < 64 * 1024, peak.growth_kib
    assert resident_kib(server.process.pid) - before_kib < 64 * 1024


def test_a_slow_reader_who_reads_gets_all_of_it(server: ServerProcess) -> None:
    body = ask(60, logprobs=5, prompt="Somebody reads this slowly:")
    with open_stream(server, {**body, "stream": True}, receive_bytes=4096) as sock:
        received = b""
        while b"[DONE]" not in received:
            time.sleep(0.02)
            piece = sock.recv(2048)
            assert piece, "the stream was cut"
            received += piece
    assert received.count(b'"logprobs":{') >= 1


def test_a_half_closed_connection_ends_its_request(server: ServerProcess) -> None:
    with open_stream(server, ask(3000)) as sock:
        assert sock.recv(1)
        sock.shutdown(socket.SHUT_WR)
        server.wait_until(lambda: server.metric("vllm:num_requests_running") == 0, 5)
    wait_until_quiet(server)


@pytest.mark.parametrize(
    "headers",
    [{f"X-{number}": "1" for number in range(20_000)}, {"X-Long": "x" * 5_000_000}],
    ids=["20,000 headers", "one of 5 MB"],
)
def test_heads_that_are_far_too_large_are_refused_and_not_kept(server: ServerProcess, headers: dict[str, str]) -> None:
    wire = build_request(COMPLETIONS, b"{}", headers=headers)
    with PeakMemory(server.process.pid) as peak:
        for _ in range(10):
            reply = send(server.port, wire)
            assert reply.status == 431 and reply.read_error()["code"] == "headers_too_large"
    assert peak.growth_kib < 32 * 1024, peak.growth_kib


@pytest.mark.parametrize("is_announced", [True, False], ids=["announced", "chunked"])
def test_a_body_of_300_mb_is_refused_and_not_kept(server: ServerProcess, is_announced: bool) -> None:
    length = {"Content-Length": str(THREE_HUNDRED_MB)}
    chunked = {"Content-Length": None, "Transfer-Encoding": "chunked"}
    head = build_request(COMPLETIONS, b"", headers=length if is_announced else chunked)
    pieces = [b" " * (1 << 20)] * 300
    with PeakMemory(server.process.pid) as peak, Prober(server) as prober:
        reply = send(server.port, head, pieces if is_announced else iter_chunked(THREE_HUNDRED_MB))
    assert reply.status == 413 and reply.read_error()["code"] == "body_too_large"
    assert peak.growth_kib < 64 * 1024, peak.growth_kib
    assert prober.longest_s < 0.5


def test_without_file_descriptors_it_waits_and_comes_back() -> None:
    limited = ("sh", "-c", 'ulimit -n 64; exec "$@"', "sh")
    with ServerProcess(*FLAGS, prefix=limited) as server, ExitStack() as stack:
        kept = stack.enter_context(httpx.Client(base_url=server.url, timeout=30))
        assert kept.get("/health").status_code == 200
        crowd = [socket.create_connection(("127.0.0.1", server.port), timeout=5) for _ in range(150)]
        time.sleep(1)
        # Who is in is served, whoever else knocks.
        assert kept.get("/health").status_code == 200
        assert kept.post(COMPLETIONS, json=ask(4, stream=False)).status_code == 200
        num_lines = len(server.lines)
        time.sleep(3)
        assert len(server.lines) - num_lines < 100, "the log is not flooded"
        for sock in crowd:
            sock.close()
        server.wait_until(lambda: read_stream(server.url, ask(4)).is_done, 30)
    assert server.process.returncode == 0
