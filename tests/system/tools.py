"""Programs that system tests need, installed where they are missing: Debian's packages, and environments of pip's.

What cannot be had fails the test with a sentence that says what to install; nothing is skipped.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[2]
_INSTALL_S = 900


def need_program(name: str, package: str) -> str:
    """Return a program's path, its Debian package installed where it was missing.

    Args:
        name: As on the PATH, or a path.
        package: What apt-get calls it.
    """
    found = _find(name)
    if found is None:
        _apt_install(package)
        found = _find(name)
    if found is None:
        pytest.fail(f"{name} is missing, and Debian's {package} does not bring it: install it by hand")
    return found


def need_root(what: str) -> None:
    """Fail where the test cannot do ``what``, for which it takes root."""
    if os.geteuid() != 0:
        pytest.fail(f"{what} takes root: run make test-system as root, in a container for instance")


@cache
def pip_environment(name: str) -> Path:
    """Return the bin folder of an environment with the packages of ``requirements-NAME.txt``, made where need be."""
    requirements = Path(__file__).parent / f"requirements-{name}.txt"
    home = _ROOT / ".venv-system" / name
    stamp = home / "requirements.txt"
    wanted = requirements.read_text(encoding="utf-8")
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != wanted:
        _run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(home))
        python = str(home / "bin/python")
        _run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "-r", str(requirements))
        stamp.write_text(wanted, encoding="utf-8")
    return home / "bin"


@cache
def _apt_install(package: str) -> None:
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        pytest.fail(f"{package} is missing: install it, with apt-get install {package} on Debian")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ("apt-get", "install", "--yes", "--quiet", "--no-install-recommends", package)
    if subprocess.run(install, env=environment, timeout=_INSTALL_S, check=False, capture_output=True).returncode:
        _run("apt-get", "update", "--quiet", environment=environment)
        _run(*install, environment=environment)


def _find(name: str) -> str | None:
    return (name if Path(name).exists() else None) if "/" in name else shutil.which(name)


def _run(*command: str, environment: dict[str, str] | None = None) -> None:
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=_INSTALL_S, check=False)
    if result.returncode:
        said = " ".join((result.stdout + result.stderr).strip().splitlines()[-5:])
        pytest.fail(f"{' '.join(command)} failed: {said}")
