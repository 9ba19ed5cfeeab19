"""An exit code is the command's, though nobody can read what it printed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PROGRAM = """
import sys
from server.lifecycle.standard_streams import settle_standard_streams
sys.{stream}.write("word")
if {settles}:
    settle_standard_streams()
sys.exit(7)
"""


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
@pytest.mark.parametrize(("settles", "code"), [(True, 7), (False, 120)])
def test_a_full_disk_leaves_the_exit_code_alone(stream: str, settles: bool, code: int) -> None:
    # /dev/full takes nothing, as a full disk does.
    program = PROGRAM.format(stream=stream, settles=settles)
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, "-c", program],
            cwd=ROOT,
            env=buffered,
            check=False,
            **{stream: full},  # type: ignore[call-overload]
        )
    assert result.returncode == code


def test_what_can_be_written_is() -> None:
    program = PROGRAM.format(stream="stdout", settles=True)
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (7, "word")
