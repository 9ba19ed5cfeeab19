"""The process as its supervisor sees it: start, drain, standstill, exit codes; and clients that keep it waiting."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.exit_codes import ExitCode
from tests.e2e.raw_http import build_request, read_reply
from tests.e2e.server_process import ServerProcess
from tests.e2e.tiny_model import write_tiny_model

SLOWED = ("-m", "tests.e2e.slowed_server")
FLAGS = ("--backend", "torch", "--num-threads", "1", "--num-kv-blocks", "256")
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_tiny_model(tmp_path_factory.mktemp("tiny")))


def build_body(**fields: Any) -> dict[str, Any]:
    usage = {"stream_options": {"include_usage": True}}
    return {"prompt": "the dog", "temperature": 0, "ignore_eos": True, "stream": True, **usage, **fields}


class Stream:
    """A stream that a thread of its own reads as it comes.

    Attributes:
        events: The data of each so far.
        is_cut: Its connection broke off.
    """

    def __init__(self, url: str, **fields: Any) -> None:
        self.events: list[str] = []
        self.is_cut = False
        self.has_begun = threading.Event()
        self._url = url + COMPLETIONS
        self._body = build_body(**fields)
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        assert self.has_begun.wait(30), "no token came"

    def _read(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=60) as response:
                for line in response.iter_lines():
                    if line.startswith("data: "):
                        self.events.append(line.removeprefix("data: "))
                        self.has_begun.set()
        except httpx.TransportError:
            self.is_cut = True

    def finish(self) -> list[str]:
        self._thread.join(30)
        assert not self._thread.is_alive(), "the stream does not end"
        return self.events


@contextmanager
def deaf_stream(server: ServerProcess) -> Iterator[socket.socket]:
    """A client that reads nothing, not even its prompt, which comes back with the logprobs of each of its tokens."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", server.port))
        body = json.dumps(build_body(prompt="the dog " * 500, max_tokens=500, logprobs=5, echo=True, n=4)).encode()
        sock.sendall(build_request(COMPLETIONS, body))
        yield sock


class Manager:
    """A service manager's socket, read as messages come: only ten wait there."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.told: list[str] = []
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind(address)
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        with suppress(OSError):  # it has been closed
            while True:
                self.told.append(self.socket.recv(4096).decode())


def check_whole(events: list[str], num_tokens: int) -> None:
    """Nothing is missing: so many tokens, an end for that reason, and the mark behind it."""
    *_, last, usage, done = events
    assert done == "[DONE]"
    assert json.loads(last)["choices"][0]["finish_reason"] == "length"
    assert json.loads(usage)["usage"]["completion_tokens"] == num_tokens


def wait_for_exit(server: ServerProcess, seconds: float = 30) -> int:
    return server.process.wait(seconds)


# ---------------------------------------------------------------------- start
@pytest.mark.parametrize("delay_s", [0.5, 1.2])
@pytest.mark.parametrize(("command", "code"), [("serve", 0), ("batch", ExitCode.INTERRUPTED)])
def test_sigterm_before_anything_runs_is_a_clean_end_of_a_server(
    model: str, tmp_path: Path, command: str, code: int, delay_s: float
) -> None:
    source = tmp_path / "in.jsonl"
    source.touch()
    files = [str(source), str(tmp_path / "out.jsonl")] if command == "batch" else ["--port", "0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "server", command, *files, model, *FLAGS],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    time.sleep(delay_s)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == code, errors
    assert "Traceback" not in errors


def test_a_pool_that_memory_does_not_hold_is_told_by_the_exit_code(model: str) -> None:
    with ServerProcess(model, *FLAGS[:4], "--num-kv-blocks", str(10**9), wait_ready=False) as server:
        assert wait_for_exit(server) == ExitCode.OUT_OF_MEMORY
    assert "The model cannot be loaded: " in server.output


# ---------------------------------------------------------------------- drain
def test_sigterm_lets_a_stream_come_to_its_end_refuses_newcomers_and_tells_the_service_manager(
    model: str, tmp_path: Path
) -> None:
    manager = Manager(str(tmp_path / "notify"))
    environment = {"SLOWED_STEP_S": "0.03", "NOTIFY_SOCKET": manager.address}
    with manager.socket, ServerProcess(model, *FLAGS, env=environment, program=SLOWED) as server:
        stream = Stream(server.url, max_tokens=60)
        server.process.send_signal(signal.SIGTERM)
        server.wait_until(lambda: "Stopping" in server.output, 5)
        ready = httpx.get(server.url + "/ready")
        assert (ready.status_code, ready.json()["status"]) == (503, "draining")
        assert httpx.get(server.url + "/health").status_code == 200
        refused = httpx.post(server.url + COMPLETIONS, json=build_body(max_tokens=1))
        assert (refused.status_code, refused.headers["connection"]) == (503, "close")
        assert int(refused.headers["retry-after"]) > 0
        check_whole(stream.finish(), 60)
        assert wait_for_exit(server) == 0
    assert "Traceback" not in server.output
    told = [message for message in manager.told if message != "WATCHDOG=1"]
    assert len(told) < len(manager.told), "it was fed"
    assert told[0].startswith("STATUS=Loading")
    assert told[-2].startswith("READY=1\nSTATUS=Serving tiny at http://")
    assert told[-1].startswith("STOPPING=1\nSTATUS=Stopping when 1 request has ended, or in 30 s")


def test_a_second_signal_ends_it_at_once(model: str) -> None:
    with ServerProcess(model, *FLAGS, env={"SLOWED_STEP_S": "0.05"}, program=SLOWED) as server:
        stream = Stream(server.url, max_tokens=4000)
        server.process.send_signal(signal.SIGTERM)
        server.wait_until(lambda: "Stopping" in server.output, 5)
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        assert wait_for_exit(server) == ExitCode.INTERRUPTED
        assert time.monotonic() - started < 2
        assert stream.finish()[-1] != "[DONE]" and stream.is_cut


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
def test_a_body_that_never_comes_does_not_hold_up_the_end(model: str, path: str) -> None:
    head = build_request(path, b"", headers={"Content-Length": "100", "Expect": "100-continue"})
    with ServerProcess(model, *FLAGS) as server, socket.create_connection(("127.0.0.1", server.port), 10) as sock:
        sock.sendall(head)
        assert sock.recv(100).startswith(b"HTTP/1.1 100"), "its body is waited for"
        sock.sendall(b'{"prompt":')
        started = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        reply = read_reply(sock)
        assert time.monotonic() - started < 1, "nothing else is in hand"
        assert wait_for_exit(server) == 0
        # A process with torch in it takes a second to go, or three on a busy machine; a drain, thirty.
        assert time.monotonic() - started < 10
    assert (reply.status, reply.headers["connection"], reply.read_error()["code"]) == (503, "close", "draining")
    assert "Traceback" not in server.output and "Cancel" not in server.output


# ---------------------------------------------------------------------- clients that keep it waiting
def test_slow_clients_lose_their_connections_and_nobody_else_anything(model: str) -> None:
    patience = ("--stream-write-timeout-s", "1", "--request-read-timeout-s", "1", "--drain-timeout-s", "0.5")
    with ServerProcess(model, *FLAGS, *patience, env={"SLOWED_STEP_S": "0.001"}, program=SLOWED) as server:
        with deaf_stream(server):
            beside = Stream(server.url, max_tokens=300)
            server.wait_until(lambda: "has not read its answer for 1 s" in server.output, 30)
            check_whole(beside.finish(), 300)
            server.wait_until(lambda: server.metric("vllm:num_requests_running") == 0, 5)
            assert server.metric("vllm:kv_cache_usage_perc") == 0
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as sock:
            sock.sendall(build_request(COMPLETIONS, b"{}", headers={"Content-Length": "100"}))
            reply = read_reply(sock)
            assert (reply.status, reply.read_error()["code"]) == (408, "slow_request")
        with deaf_stream(server):
            reading = Stream(server.url, max_tokens=4000)
            server.process.send_signal(signal.SIGTERM)
            *_, error, done = reading.finish()
            assert (json.loads(error)["error"]["code"], done) == ("aborted", "[DONE]")
            assert wait_for_exit(server) == 0
    assert "Traceback" not in server.output and "Cancel" not in server.output


# ---------------------------------------------------------------------- standstill
def test_a_stuck_step_is_not_ready_within_two_seconds_and_ends_the_process_with_a_word_to_each_stream(
    model: str, tmp_path: Path
) -> None:
    stuck_file = tmp_path / "stuck"
    environment = {"SLOWED_STEP_S": "0.01", "SLOWED_STUCK_FILE": str(stuck_file)}
    with ServerProcess(model, *FLAGS, "--watchdog-timeout-s", "4", env=environment, program=SLOWED) as server:
        stream = Stream(server.url, max_tokens=4000)
        stuck_file.touch()
        started = time.monotonic()
        server.wait_until(lambda: httpx.get(server.url + "/ready").status_code == 503, 10)
        assert time.monotonic() - started < 4, "2 s, and what a busy machine adds"
        ready = httpx.get(server.url + "/ready").json()
        assert (ready["status"], ready["error"]["code"]) == ("stuck", "not_ready")
        assert "The engine has work but has made no progress for " in ready["error"]["message"]
        assert httpx.get(server.url + "/health").status_code == 200
        server.wait_until(lambda: server.metric("pointsman:watchdog_near_misses_total") == 1, 3)
        *_, error, done = stream.finish()
        assert wait_for_exit(server) == ExitCode.STUCK
        assert time.monotonic() - started < 4 + 5
    assert (json.loads(error)["error"]["code"], done) == ("engine_stuck", "[DONE]")
    assert "execute_slowly" in server.output, "every thread's stack is in the log"
