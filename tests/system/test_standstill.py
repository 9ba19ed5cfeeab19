"""An event loop that stands still: nobody can be told, yet the process ends."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.exit_codes import ExitCode
from tests.e2e.server_process import ServerProcess
from tests.e2e.test_lifecycle import FLAGS, SLOWED, Stream
from tests.e2e.tiny_model import write_tiny_model

pytestmark = pytest.mark.system


def test_a_loop_that_hangs_does_not_keep_the_watchdog_from_ending_the_process(tmp_path: Path) -> None:
    loop_file = tmp_path / "loop"
    environment = {"SLOWED_STEP_S": "0.01", "SLOWED_LOOP_FILE": str(loop_file)}
    model = str(write_tiny_model(tmp_path))
    with ServerProcess(model, *FLAGS, "--watchdog-timeout-s", "2", env=environment, program=SLOWED) as server:
        stream = Stream(server.url, max_tokens=4000)
        loop_file.touch()
        assert server.process.wait(20) == ExitCode.STUCK
        stream.finish()
        assert stream.is_cut
    assert "event loop has not moved for" in server.output
    assert "take_slowly" in server.output, "every thread's stack is in the log"
