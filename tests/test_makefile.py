"""What make does on a machine whose Python is not quite as expected. Nothing is downloaded: pip is a recorder."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# What runs as PYTHON. Only the recorder stands where pip would be installed.
_PYTHON = """#!/bin/sh
echo "$*" >> calls
case "$*" in
  *version_info*) exit {version_rc} ;;
  *ensurepip* | *"import torch"*) exit 1 ;;
  "-m pip --python"*) printf '#!/bin/sh\\necho "$*" >> calls\\n' > .venv/bin/pip; chmod +x .venv/bin/pip ;;
  *) exec {python} "$@" ;;
esac
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("Makefile", "requirements.lock", "pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


def make_setup(folder: Path, *, version_rc: int = 0) -> subprocess.CompletedProcess[str]:
    python = folder / "python"
    python.write_text(_PYTHON.format(version_rc=version_rc, python=sys.executable))
    python.chmod(0o755)
    command = ["make", "-C", str(folder), "--no-print-directory", "PYTHON=./python", ".venv/.setup"]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_an_old_python_is_refused_before_anything_is_made(folder: Path) -> None:
    result = make_setup(folder, version_rc=1)
    assert result.returncode != 0
    assert "./python is no Python 3.11 or newer" in result.stdout
    assert not (folder / ".venv").exists()


def test_a_python_without_ensurepip_and_a_half_made_environment_are_no_obstacle(folder: Path) -> None:
    (folder / ".venv").mkdir()
    result = make_setup(folder)
    assert result.returncode == 0, result.stdout + result.stderr
    calls = (folder / "calls").read_text().splitlines()
    assert "-m venv --clear --without-pip .venv" in calls
    assert "install --quiet -r .venv/requirements.txt" in calls
    assert (folder / ".venv/.setup").exists()


def test_contributing_tells_what_each_target_does() -> None:
    makefile, told = ((ROOT / name).read_text(encoding="utf-8") for name in ("Makefile", "CONTRIBUTING.md"))
    (targets,) = re.findall(r"^\.PHONY: (.+)$", makefile, re.MULTILINE)
    assert [target for target in targets.split() if f"\n| `make {target}` | " not in told] == []
