from __future__ import annotations

import re
import subprocess
import sys

import pytest

from server.cli import build_parser
from server.exit_codes import ExitCode


def test_every_code_is_explained_and_they_are_what_scripts_rely_on() -> None:
    assert ExitCode.__doc__ is not None
    assert [code.name for code in ExitCode if f"        {code.name}: " not in ExitCode.__doc__] == []
    assert list(map(int, ExitCode)) == [0, 1, 64, 65, 66, 69, 70, 74, 130]


def test_a_batch_needs_no_http_server() -> None:
    program = "import sys, server.batch.job; print('uvicorn' in sys.modules, 'server.daemon' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert result.stdout == "False False\n"


def test_the_help_of_a_batch_names_the_codes_it_ends_with(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["batch", "--help"])
    told = capsys.readouterr().out.split("Exit code:")[1].split("\n\n")[0]
    named = re.findall(r"(\d+)\s+=\s", told)
    codes = ExitCode.OK, ExitCode.SOME_FAILED, ExitCode.ENGINE_DIED, ExitCode.FILE_ERROR, ExitCode.INTERRUPTED
    assert list(map(int, named)) == list(codes)
