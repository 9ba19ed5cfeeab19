from __future__ import annotations

import re
import subprocess
import sys

import pytest

from engine_core import EngineFailure
from server.cli import build_parser
from server.exit_codes import ExitCode, code_of_failure


def test_every_code_is_explained_and_they_are_what_scripts_rely_on() -> None:
    assert ExitCode.__doc__ is not None
    assert [code.name for code in ExitCode if f"        {code.name}: " not in ExitCode.__doc__] == []
    assert list(map(int, ExitCode)) == [0, 1, 64, 65, 66, 69, 70, 71, 74, 75, 130]


@pytest.mark.parametrize(
    ("failure", "code"),
    [
        (EngineFailure.CONFIG, 64),
        (EngineFailure.CHECKPOINT, 65),
        (EngineFailure.FAULT, 70),
        (None, 70),
        (EngineFailure.MEMORY, 75),
    ],
)
def test_an_engines_death_ends_the_process_by_what_it_died_of(failure: EngineFailure | None, code: int) -> None:
    assert code_of_failure(failure) == code


def test_a_batch_needs_no_http_server() -> None:
    program = "import sys, server.batch.job; print('uvicorn' in sys.modules, 'server.lifecycle.daemon' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "False False\n"


def test_the_help_of_a_batch_names_the_codes_it_ends_with(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["batch", "--help"])
    told = capsys.readouterr().out.split("Exit code:")[1].split("\n\n")[0]
    named = re.findall(r"(\d+)\s+=\s", told)
    codes = ExitCode.OK, ExitCode.SOME_FAILED, ExitCode.ENGINE_DIED, ExitCode.FILE_ERROR, ExitCode.INTERRUPTED
    assert list(map(int, named)) == list(codes)
