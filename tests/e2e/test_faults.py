"""Two faults that need nothing but a signal or an exception; the others are tests/system/'s."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from server.exit_codes import ExitCode
from tests.e2e.server_process import ServerProcess
from tests.system.clients import Stream, ask, read_stream

FLAGS = ("--num-kv-blocks", "64", "--max-num-seqs", "8")


def test_a_killed_server_cuts_its_streams_and_its_port_serves_again(embedded_model: Path) -> None:
    with ServerProcess(*FLAGS) as server:
        expected = read_stream(server.url, ask(8)).text
        stream = Stream(server.url, ask(2000))
        stream.wait_for_events(3)
        os.kill(server.process.pid, signal.SIGKILL)
        seen = stream.wait(10)
        assert seen.broken and seen.text and not seen.is_done and seen.finish_reason is None
        assert server.process.wait(10) == -signal.SIGKILL
    with ServerProcess(*FLAGS, port=server.port) as again:
        assert read_stream(again.url, ask(8)).text == expected


def test_an_exception_in_a_step_is_told_to_every_stream_and_ends_the_process(embedded_model: Path) -> None:
    fault = {"FAULT": "20:raise"}
    with ServerProcess(*FLAGS, env=fault, program=("-m", "tests.system.faulty_server")) as server:
        streams = [Stream(server.url, ask(500, prompt=f"Story {i}:")) for i in range(3)]
        for stream in streams:
            seen = stream.wait(20)
            assert seen.is_done and seen.finish_reason is None, seen
            assert seen.error is not None and seen.error["code"] == "engine_dead"
        assert server.process.wait(10) == ExitCode.ENGINE_DIED
