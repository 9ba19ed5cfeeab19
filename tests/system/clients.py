"""Clients of a server that something happens to: streams read to whatever end, and what the process costs meanwhile."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.raw_http import build_request
from tests.e2e.server_process import ServerProcess

COMPLETIONS = "/v1/completions"
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
_FIRST_S = 60.0


def ask(max_tokens: int, **overrides: Any) -> dict[str, Any]:
    """A greedy stream that ends by its length and nothing else."""
    plain = {"prompt": "Once upon a time", "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    return {**plain, "stream": True, **overrides}


@dataclass
class Seen:
    """What a client got of one stream.

    Attributes:
        status: Of the response; 0 = none came.
        events: The JSON of each event but [DONE].
        is_done: [DONE] came.
        broken: The connection's own error, if it ended with one.
    """

    status: int = 0
    events: list[dict[str, Any]] = field(default_factory=list)
    is_done: bool = False
    broken: str = ""

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(choice["text"] for event in self.events for choice in event.get("choices", []))

    @property
    def finish_reason(self) -> str | None:
        """Why it ended, where it was said."""
        choices = [choice for event in self.events for choice in event.get("choices", [])]
        return choices[-1]["finish_reason"] if choices else None

    @property
    def error(self) -> dict[str, Any] | None:
        """The error object, where one came."""
        return next((event["error"] for event in self.events if "error" in event), None)


class Stream:
    """A stream being read on a thread of its own.

    Args:
        url: The server's.
        body: Of the request.
        path: Where it goes.

    Attributes:
        seen: So far.
    """

    def __init__(self, url: str, body: dict[str, Any], path: str = COMPLETIONS) -> None:
        self.seen = Seen()
        self._url = url + path
        self._body = body
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_for_events(self, num_events: int) -> None:
        """Wait until so many have come."""
        wait_until(lambda: len(self.seen.events) >= num_events or not self._thread.is_alive(), _FIRST_S)
        assert len(self.seen.events) >= num_events, self.seen

    def wait(self, seconds: float = 120.0) -> Seen:
        """Wait for its end, whichever."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), f"the stream did not end within {seconds} s: {self.seen}"
        return self.seen

    def _read(self) -> None:
        try:
            with httpx.stream("POST", self._url, json=self._body, timeout=300) as reply:
                self.seen.status = reply.status_code
                if reply.status_code != 200:
                    self.seen.events.append(json.loads(reply.read()))
                    return
                for line in reply.iter_lines():
                    self._take(line)
        except httpx.HTTPError as error:
            self.seen.broken = repr(error)

    def _take(self, line: str) -> None:
        if line == "data: [DONE]":
            self.seen.is_done = True
        elif line.startswith("data: "):
            self.seen.events.append(json.loads(line.removeprefix("data: ")))


def read_stream(url: str, body: dict[str, Any]) -> Seen:
    """Read one stream to its end."""
    return Stream(url, body).wait()


def open_stream(
    server: ServerProcess, body: dict[str, Any], path: str = COMPLETIONS, receive_bytes: int = 0
) -> socket.socket:
    """Ask over a socket of our own, which nobody reads yet.

    Args:
        server: Whom.
        body: Of the request.
        path: Where it goes.
        receive_bytes: Of the socket's own buffer; 0 = as the system has it.
    """
    sock = socket.socket()
    if receive_bytes:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    sock.settimeout(60)
    sock.connect(("127.0.0.1", server.port))
    sock.sendall(build_request(path, json.dumps(body).encode()))
    return sock


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s in vain"
        time.sleep(0.02)


def wait_until_quiet(server: ServerProcess, seconds: float = 60.0) -> None:
    """Wait until nothing runs or waits and every block is free; nothing may have gone wrong on the way."""
    for name in GAUGES:
        server.wait_until(lambda name=name: server.metric(name) == 0, seconds)
    assert "Traceback" not in server.output, server.output


def resident_kib(pid: int) -> int:
    """Return a process's resident memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))


class PeakMemory:
    """`with PeakMemory(pid) as peak: ...`, then ``peak.growth_kib``: how far it rose above what it was before."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._before = self._peak = resident_kib(pid)

    @property
    def growth_kib(self) -> int:
        return self._peak - self._before

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.01):
            self._peak = max(self._peak, resident_kib(self._pid))
