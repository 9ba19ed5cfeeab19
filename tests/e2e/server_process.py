"""A real `pointsman serve` process for tests: started on a free port, watched until ready, always stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from types import TracebackType

import httpx

START_S = 120.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class ServerProcess:
    """`with ServerProcess("--max-num-seqs", "8") as server: httpx.get(server.url + "/health")`.

    Attributes:
        url: Without a path.
        lines: What it printed, both streams, so far.
    """

    def __init__(
        self,
        *args: str,
        env: dict[str, str] | None = None,
        wait_ready: bool = True,
        program: Sequence[str] = ("-m", "server"),
        port: int | None = None,
        prefix: Sequence[str] = (),
    ) -> None:
        """Describe a server; ``with`` starts it.

        Args:
            args: Flags of serve.
            env: Beside what the test has.
            wait_ready: Start means that it answers.
            program: What Python runs: the server, or something around it.
            port: None = a free one.
            prefix: A program that runs it, such as a shell which sets limits first; it must exec, not fork.
        """
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        self.lines: list[str] = []
        command = [sys.executable, *program, "serve", *args, "--port", str(self.port)]
        self._command: Sequence[str] = [*prefix, *command]
        # As a user starts it: with all cores, unlike the tests' own torch.
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        self._env = {**inherited, "PYTHONUNBUFFERED": "1", **(env or {})}
        self._wait_ready = wait_ready

    def __enter__(self) -> ServerProcess:
        self.process = subprocess.Popen(
            self._command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self._env
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if self._wait_ready:
            self.wait_until(lambda: self._get_ready() == 200)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise
        self._reader.join(10)
        assert self.process.stdout is not None
        self.process.stdout.close()

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def metric(self, name: str) -> float:
        """Return the sum of a metric's samples, over its labels."""
        lines = httpx.get(self.url + "/metrics").text.splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0].split(" ")[0] == name)

    def wait_until(self, condition: object, seconds: float = START_S) -> None:
        """Poll ``condition`` until it holds; the process dying first is a failure with its output."""
        assert callable(condition)
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.output}"
            assert time.monotonic() < deadline, f"waited {seconds} s in vain:\n{self.output}"
            time.sleep(0.02)

    def _get_ready(self) -> int:
        try:
            return httpx.get(self.url + "/ready", timeout=5).status_code
        except httpx.TransportError:
            return 0

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
