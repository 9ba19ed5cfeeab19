"""A server that is killed, frozen, told to stop, or goes wrong inside: what its clients see and how it ends."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.exit_codes import ExitCode
from tests.e2e.server_process import ServerProcess
from tests.system.clients import COMPLETIONS, Seen, Stream, ask, read_stream, wait_until

FLAGS = ("--num-kv-blocks", "256", "--max-num-seqs", "16")
LONG = 1500


class FaultyServer(ServerProcess):
    """A server in which step 40 goes wrong: several streams are under way by then."""

    def __init__(self, kind: str, *args: str, once: Path | None = None) -> None:
        env = {"FAULT": f"40:{kind}", "FAULT_ONCE": str(once or "")}
        super().__init__(*FLAGS, *args, env=env, program=("-m", "tests.system.faulty_server"))


def signal_amid_streams(server: ServerProcess, *numbers: int, num_tokens: int = LONG) -> list[Seen]:
    """Send signals while three streams run; return what came of these."""
    streams = [Stream(server.url, ask(num_tokens, prompt=f"Story {i}:")) for i in range(3)]
    for stream in streams:
        stream.wait_for_events(3)
    for number in numbers:
        os.kill(server.process.pid, number)
        time.sleep(0.2)
    return [stream.wait() for stream in streams]


def get_status(server: ServerProcess, path: str) -> int:
    try:
        return httpx.get(server.url + path, timeout=2).status_code
    except httpx.TransportError:
        return 0


def post(server: ServerProcess) -> tuple[int, dict[str, Any]]:
    try:
        reply = httpx.post(server.url + COMPLETIONS, json=ask(1, stream=False), timeout=5)
    except httpx.TransportError:
        return 0, {}
    return reply.status_code, reply.json()


def check_errors(seen: list[Seen], code: str) -> None:
    """Each stream was told why it ends, in an event, and ended in order."""
    for each in seen:
        assert each.status == 200 and each.broken == "" and each.is_done, each
        assert each.error is not None and each.error["code"] == code, each.error
        assert each.error["message"].endswith((".", "?"))
        assert each.finish_reason is None, "an answer that was cut must not look whole"


def test_kill_9_cuts_the_streams_and_the_next_start_needs_nothing_built_or_fetched() -> None:
    with ServerProcess(*FLAGS) as server:
        expected = read_stream(server.url, ask(16)).text
        seen = signal_amid_streams(server, signal.SIGKILL)
        assert server.process.wait(10) == -signal.SIGKILL
    for each in seen:
        assert each.broken and not each.is_done and each.finish_reason is None, each
        assert each.text, "what came before stays"
    with ServerProcess(*FLAGS, port=server.port) as again:
        assert read_stream(again.url, ask(16)).text == expected
        assert "Building" not in again.output and "Fetching" not in again.output
    assert again.process.returncode == 0


def test_a_process_that_was_frozen_goes_on_and_no_watchdog_takes_it_for_stuck() -> None:
    with ServerProcess(*FLAGS, "--watchdog-timeout-s", "2") as server:
        expected = [read_stream(server.url, ask(80, prompt=f"Story {i}:")).text for i in range(3)]
        streams = [Stream(server.url, ask(80, prompt=f"Story {i}:")) for i in range(3)]
        for stream in streams:
            stream.wait_for_events(3)
        os.kill(server.process.pid, signal.SIGSTOP)
        time.sleep(6)
        os.kill(server.process.pid, signal.SIGCONT)
        assert [stream.wait().text for stream in streams] == expected
        assert all(stream.seen.is_done and stream.seen.finish_reason == "length" for stream in streams)
        wait_until(lambda: get_status(server, "/ready") == 200, 5)
    assert server.process.returncode == 0


def test_an_exception_in_a_step_reaches_every_stream_and_ends_the_process() -> None:
    with FaultyServer("raise") as server:
        streams = [Stream(server.url, ask(LONG, prompt=f"Story {i}:")) for i in range(4)]
        check_errors([stream.wait(20) for stream in streams], "engine_dead")
        assert post(server)[0] in (0, 503), "whoever comes later is refused, or finds nobody"
        assert server.process.wait(10) == ExitCode.ENGINE_DIED
    assert "a fault was asked for in this step" in server.output


def test_a_step_without_an_end_shows_in_ready_and_then_ends_the_process() -> None:
    with FaultyServer("hang", "--watchdog-timeout-s", "6") as server:
        streams = [Stream(server.url, ask(LONG, prompt=f"Story {i}:")) for i in range(4)]
        for stream in streams:
            stream.wait_for_events(1)
        wait_until(lambda: get_status(server, "/ready") == 503, 8)
        assert get_status(server, "/health") == 200, "it is not dead yet"
        check_errors([stream.wait(20) for stream in streams], "engine_stuck")
        assert server.process.wait(15) == ExitCode.STUCK
    assert "faulty_server.py" in server.output, "what every thread was doing is in the log"


def test_told_to_stop_while_it_loads_it_stops() -> None:
    with ServerProcess(*FLAGS, wait_ready=False) as server:
        server.wait_until(lambda: get_status(server, "/ready") == 503, 60)
        os.kill(server.process.pid, signal.SIGTERM)
        assert server.process.wait(10) == ExitCode.OK
    assert "Traceback" not in server.output


def test_told_to_stop_before_it_can_hear_it_stops_too() -> None:
    with ServerProcess(*FLAGS, wait_ready=False) as server:
        time.sleep(0.3)
        os.kill(server.process.pid, signal.SIGTERM)
        # Python's own first steps are before any line of ours.
        assert server.process.wait(10) in (ExitCode.OK, -signal.SIGTERM)
    assert "Traceback" not in server.output


def test_told_to_stop_it_finishes_what_runs_and_takes_nothing_new() -> None:
    with ServerProcess(*FLAGS, "--drain-timeout-s", "60") as server:
        expected = read_stream(server.url, ask(300)).text
        stream = Stream(server.url, ask(300))
        stream.wait_for_events(3)
        os.kill(server.process.pid, signal.SIGTERM)
        wait_until(lambda: get_status(server, "/ready") == 503, 5)
        assert get_status(server, "/health") == 200
        status, body = post(server)
        assert status == 503 and body["error"]["code"] == "draining", body
        seen = stream.wait()
        assert (seen.text, seen.finish_reason, seen.is_done) == (expected, "length", True)
        assert server.process.wait(10) == ExitCode.OK


def test_what_does_not_end_in_time_is_told_so() -> None:
    with ServerProcess("--num-kv-blocks", "512", "--max-num-seqs", "16", "--drain-timeout-s", "1") as server:
        seen = signal_amid_streams(server, signal.SIGTERM, num_tokens=8000)
        check_errors(seen, "aborted")
        assert server.process.wait(10) == ExitCode.OK


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_told_twice_it_stops_at_once(second: int) -> None:
    with ServerProcess(*FLAGS, "--drain-timeout-s", "60") as server:
        seen = signal_amid_streams(server, signal.SIGTERM, second)
        assert server.process.wait(5) == ExitCode.INTERRUPTED
    assert all(not each.is_done for each in seen)
