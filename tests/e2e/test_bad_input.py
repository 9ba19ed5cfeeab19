"""Bad input on a real server, while an ordinary stream runs beside it that must not notice.

Whatever is refused gets a 4xx that nobody retries, OpenAI's error object and a sentence that says what to change.
"""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.bad_requests import BAD_REQUESTS, CHAT, COMPLETIONS, HELLO, BadRequest
from tests.e2e.raw_http import Reply, build_request, iter_chunked, read_reply, send
from tests.e2e.server_process import ServerProcess
from tests.server.stream_join import join_completion

# What openai-python and routers send again, as they do every 5xx.
RETRIED = {408, 409, 429}
SIXTY_MB = 60 << 20
ONE_TOKEN = json.dumps({**HELLO, "max_tokens": 1}).encode()


class OrdinaryStreams:
    """Greedy streams, one after the other, each compared with what the first one said while it was alone."""

    def __init__(self, server: ServerProcess) -> None:
        self._url = server.url + COMPLETIONS
        self._is_over = False
        self.expected = self._read_stream()
        self.others: list[dict[str, Any] | Exception] = []
        self.num_streams = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def end(self) -> None:
        self._is_over = True
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over:
            seen = self._read_stream()
            self.num_streams += 1
            if seen != self.expected:
                self.others.append(seen)

    def _read_stream(self) -> dict[str, Any] | Exception:
        """What one stream said in all: how its tokens fall into chunks depends on who else keeps the loop busy."""
        body = {"prompt": "The capital of France is", "max_tokens": 16, "temperature": 0, "stream": True, "logprobs": 2}
        try:
            reply = httpx.post(self._url, json={**body, "stream_options": {"include_usage": True}}, timeout=120)
            *events, done = [event.removeprefix("data: ") for event in reply.text.split("\n\n") if event[:1] == "d"]
            assert done == "[DONE]"
            return {**join_completion([json.loads(event) for event in events]), "id": "", "created": 0}
        except Exception as error:
            return error


@pytest.fixture(scope="module")
def server(embedded_model: Path) -> Iterator[ServerProcess]:
    with ServerProcess("--max-model-len", "256", "--num-kv-blocks", "64", "--max-num-seqs", "16") as process:
        yield process


@pytest.fixture(scope="module")
def ordinary(server: ServerProcess) -> Iterator[OrdinaryStreams]:
    streams = OrdinaryStreams(server)
    try:
        yield streams
    finally:
        streams.end()


def check_refusal(reply: Reply, *, status: int, code: str, says: str, param: str | None = None) -> None:
    assert reply.status == status and 400 <= status < 500 and status not in RETRIED, reply
    assert "retry-after" not in reply.headers and reply.headers["x-request-id"]
    error = reply.read_error()
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", code, param)
    assert re.search(says, error["message"]) and error["message"].endswith((".", "?")), error["message"]


def check_bad_request(server: ServerProcess, bad: BadRequest) -> None:
    reply = send(server.port, bad.build_wire())
    check_refusal(reply, status=bad.status, code=bad.code, says=bad.says, param=bad.param)


def check_all_quiet(server: ServerProcess) -> None:
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        server.wait_until(lambda name=name: server.metric(name) == 0, 30)
    assert httpx.get(server.url + "/health").status_code == 200
    assert "Traceback" not in server.output and '"level":"error"' not in server.output, server.output


@pytest.mark.parametrize("bad", BAD_REQUESTS, ids=lambda bad: bad.name)
def test_it_is_refused_with_what_to_change(server: ServerProcess, ordinary: OrdinaryStreams, bad: BadRequest) -> None:
    check_bad_request(server, bad)
    assert not ordinary.others


def test_what_is_refused_before_any_route_sees_it_is_counted(server: ServerProcess, ordinary: OrdinaryStreams) -> None:
    def count() -> float:
        lines = httpx.get(server.url + "/metrics").text.splitlines()
        return sum(float(line.split(" ")[1]) for line in lines if line.startswith(series))

    series = 'http_requests_total{handler="other",method="other",status="4xx"}'
    num_before = count()
    assert send(server.port, b"hello\r\n\r\n").status == 400
    assert count() == num_before + 1


@pytest.mark.parametrize("is_announced", [True, False], ids=["announced", "chunked"])
def test_a_body_of_60_mb_is_refused_before_it_is_sent(
    server: ServerProcess, ordinary: OrdinaryStreams, is_announced: bool
) -> None:
    length = {"Content-Length": str(SIXTY_MB)}
    chunked = {"Content-Length": None, "Transfer-Encoding": "chunked"}
    head = build_request(COMPLETIONS, b"", headers=length if is_announced else chunked)
    body = [b" " * SIXTY_MB] if is_announced else iter_chunked(SIXTY_MB)
    reply = send(server.port, head, body)
    check_refusal(reply, status=413, code="body_too_large", says="larger than 16777216 bytes, the most")
    assert reply.headers["connection"] == "close"
    assert not ordinary.others


def test_a_client_that_asks_first_is_told_before_it_sends_a_body_that_is_too_large(
    server: ServerProcess, ordinary: OrdinaryStreams
) -> None:
    headers = {"Content-Length": str(SIXTY_MB), "Expect": "100-continue"}
    reply = send(server.port, build_request(COMPLETIONS, b"", headers=headers))
    check_refusal(reply, status=413, code="body_too_large", says="larger than")


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_good_requests_of_an_old_or_careful_client_are_answered(
    server: ServerProcess, ordinary: OrdinaryStreams, version: str
) -> None:
    careful = {"Expect": "100-continue"} if version == "1.1" else {}
    reply = send(server.port, build_request(COMPLETIONS, ONE_TOKEN, version=version, headers=careful))
    assert reply.status == 200
    assert (reply.headers.get("connection") == "close") == (version == "1.0")
    bad = send(server.port, build_request(COMPLETIONS, b"{", version=version))
    check_refusal(bad, status=400, code="malformed_body", says="is not valid JSON")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (rb'{"prompt": "a\ud83d", "echo": true, "max_tokens": 0}', "a\ufffd"),
        (b'{"prompt": "a\xed\xa0\xbd", "echo": true, "max_tokens": 0}', "a\ufffd"),
        (b'{"prompt": "b", "prompt": "c", "echo": true, "max_tokens": 0}', "c"),
        (b'{"prompt": "d", "echo": true, "max_tokens": 0, "top_k": 1' + b"0" * 400 + b"}", "d"),
        (b'{"prompt": "a\\u0000b", "echo": true, "max_tokens": 0}', "a\0b"),
    ],
    ids=["escaped surrogate", "encoded surrogate", "a key twice", "a huge number that means all", "NUL"],
)
def test_odd_bodies_that_have_a_meaning_are_taken(
    server: ServerProcess, ordinary: OrdinaryStreams, body: bytes, text: str
) -> None:
    reply = send(server.port, build_request(COMPLETIONS, body))
    assert reply.status == 200, reply
    assert json.loads(reply.body)["choices"][0]["text"] == text
    assert not ordinary.others


def test_a_huge_max_tokens_ends_at_the_context(server: ServerProcess, ordinary: OrdinaryStreams) -> None:
    body = {"prompt": [1] * 254, "max_tokens": 10**400, "temperature": 0, "ignore_eos": True}
    answer = json.loads(send(server.port, build_request(COMPLETIONS, json.dumps(body).encode())).body)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == 256


def test_answers_to_pipelined_requests_come_in_order_bad_ones_among_them(
    server: ServerProcess, ordinary: OrdinaryStreams
) -> None:
    bodies = (ONE_TOKEN, b"{", ONE_TOKEN, b'{"prompt": ""}')
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(b"".join(build_request(COMPLETIONS, body) for body in bodies))
        replies, rest = [], b""
        for _ in bodies:
            replies.append(read_reply(sock, rest))
            rest = replies[-1].rest
    assert [reply.status for reply in replies] == [200, 400, 200, 400]
    check_refusal(replies[1], status=400, code="malformed_body", says="is not valid JSON")
    check_refusal(replies[3], status=400, code="invalid_value", says="is empty", param="prompt")


@pytest.mark.parametrize(
    "wire",
    [
        build_request(COMPLETIONS, ONE_TOKEN, headers={"Content-Length": str(len(ONE_TOKEN) + 10)}),
        build_request(CHAT, ONE_TOKEN)[:-40],
        build_request(COMPLETIONS, b"ff\r\n{", headers={"Content-Length": None, "Transfer-Encoding": "chunked"}),
        b"POST /v1/comple",
        b"",
        build_request(COMPLETIONS, json.dumps({**HELLO, "max_tokens": 400, "ignore_eos": True}).encode()),
    ],
    ids=["body too short", "body cut", "chunk cut", "head cut", "nothing", "a whole request"],
)
def test_a_client_that_closes_its_side_is_gone_and_nothing_is_kept_for_it(
    server: ServerProcess, ordinary: OrdinaryStreams, wire: bytes
) -> None:
    # A half-closed connection looks like one whose client has left, and such a client's request must end at once.
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
        sock.sendall(wire)
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1 << 16) == b""
    server.wait_until(lambda: server.metric("vllm:num_requests_running") <= 1, 10)
    assert not ordinary.others


def test_all_of_it_at_once_leaves_nothing_behind(server: ServerProcess, ordinary: OrdinaryStreams) -> None:
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda bad: check_bad_request(server, bad), BAD_REQUESTS))
    num_before = ordinary.num_streams
    server.wait_until(lambda: ordinary.num_streams > num_before, 60)
    ordinary.end()
    assert not ordinary.others and isinstance(ordinary.expected, dict)
    check_all_quiet(server)
    reply = send(server.port, build_request(COMPLETIONS, ONE_TOKEN))
    assert reply.status == 200
    check_all_quiet(server)
