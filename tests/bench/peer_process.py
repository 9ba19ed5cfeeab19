"""One peer's process: started, timed until it answers, asked to run loads, and always ended with all it has started."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # run as a script, Python looks beside the script only

from server.bench.client import BenchClient, run_in_loop
from server.bench.load import run_load
from server.bench.target import Target
from tests.bench.peer_catalog import ROOT, SERVED_NAME, PeerFailure, Start
from tests.bench.peer_loads import WARM_UP, WARM_UP_NAME, NamedLoad, OnResult, measure, scale_load

_START_S = 600.0
_POLL_S = 0.05
_END_S = 30.0
_LOG_CHARS = 2_000


class PeerProcess:
    """`with PeerProcess(start, log) as process: process.run("W1", repeat=0)`.

    Args:
        start: How.
        log: Where what it prints goes.
        limit_s: A load that takes longer is given up.

    Attributes:
        pid: Of the process that was started.
        ready_s: From its start to its first token.
    """

    def __init__(self, start: Start, log: Path, *, limit_s: float) -> None:
        self.ready_s = 0.0
        self._start = start
        self._log = log
        self._limit_s = limit_s
        self._port = 0 if start.is_driven else find_free_port()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_dead(self) -> bool:
        """Whether it has ended by itself, or had to be."""
        return self._process.poll() is not None

    def __enter__(self) -> PeerProcess:
        started_s = time.perf_counter()
        self._out: IO[bytes] = self._log.open("wb")
        self._process = self._spawn()
        try:
            self._wait_until_ready(started_s + _START_S)
        except BaseException:
            self._end()
            raise
        self.ready_s = time.perf_counter() - started_s
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._end()

    def warm_up(self) -> None:
        """Let it see prompts, batches and answers once."""
        if self._start.is_driven:
            self._ask(WARM_UP_NAME, 0, is_smoke=False)
        else:
            run_in_loop(self._within_limit(run_load(self._client(), WARM_UP)))

    def run(self, name: str, *, repeat: int, is_smoke: bool, on_result: OnResult = lambda _: None) -> dict[str, Any]:
        """Run a load and return its figures.

        Raises:
            PeerFailure: It did not end in time, or the process ended first.
        """
        if self._start.is_driven:
            return self._ask(name, repeat, is_smoke=is_smoke)
        named = scale_load(name, repeat=repeat, is_smoke=is_smoke)
        return run_in_loop(self._within_limit(self._measure(named, on_result)))

    async def _measure(self, named: NamedLoad, on_result: OnResult) -> dict[str, Any]:
        return await measure(self._client(), named, on_result)

    def _client(self) -> BenchClient:
        return BenchClient(Target("127.0.0.1", self._port), SERVED_NAME, timeout_s=self._limit_s)

    async def _within_limit(self, work: Any) -> Any:
        try:
            async with asyncio.timeout(self._limit_s):
                return await work
        except TimeoutError:
            raise PeerFailure(f"no end within {self._limit_s:g} s") from None

    def _ask(self, name: str, repeat: int, *, is_smoke: bool) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # told by the missing answer
            self._process.stdin.write(f"{name} {repeat} {int(is_smoke)}\n".encode())
            self._process.stdin.flush()
        return self._read_answer(self._limit_s)

    def _read_answer(self, limit_s: float) -> dict[str, Any]:
        """Return the driver's next line of JSON; whatever else it prints goes into the log."""
        assert self._process.stdout is not None
        timer = threading.Timer(limit_s, self._kill)
        timer.start()
        try:
            for line in self._process.stdout:
                if line.startswith(b"{"):
                    return dict(json.loads(line))
                self._out.write(line)
        finally:
            is_late = not timer.is_alive()
            timer.cancel()
            timer.join()
        raise PeerFailure(f"no end within {limit_s:g} s" if is_late else self._describe_end())

    def _spawn(self) -> subprocess.Popen[bytes]:
        command = self._start.command + ([] if self._start.is_driven else ["--port", str(self._port)])
        inherited = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
        pipe = subprocess.PIPE if self._start.is_driven else None
        return subprocess.Popen(
            command,
            cwd=ROOT,
            env={**inherited, **self._start.env},
            stdin=pipe or subprocess.DEVNULL,
            stdout=pipe or self._out,
            stderr=self._out,
            start_new_session=True,
        )

    def _wait_until_ready(self, deadline_s: float) -> None:
        if self._start.is_driven:
            self._read_answer(_START_S)
            return
        while run_in_loop(self._client().complete(" word", 1)).error is not None:
            if self._process.poll() is not None:
                raise PeerFailure(self._describe_end())
            if time.perf_counter() > deadline_s:
                raise PeerFailure(f"not ready within {_START_S:g} s; see {self._log}")
            time.sleep(_POLL_S)

    def _describe_end(self) -> str:
        self._out.flush()
        said = self._log.read_bytes()[-_LOG_CHARS:].decode("utf-8", "replace").strip()
        return f"the process ended with {self._process.wait()}; {self._log} ends in:\n{said}"

    def _end(self) -> None:
        self._signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        # What it has started may outlive it.
        self._kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self._out.close()

    def _kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


def find_free_port() -> int:
    """Return a port that nothing listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
