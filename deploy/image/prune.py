"""Removes from an installed torch its tests and what only compiling against it needs: 190 MB. Run in its environment.

With --cpu-only it first makes sure that this is torch's CPU build, which not every package index has.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import sys
from pathlib import Path

_NOT_NEEDED = ("include", "share", "test")
_NEEDED_PROGRAM = "torch_shm_manager"  # which torch.multiprocessing starts; beside it are tests and protoc
_CUDA = """The package index gave torch {version}, a CUDA build of several GB, for the image that computes on CPUs.
Point pip at PyTorch's CPU index, by --build-arg PIP_EXTRA_INDEX_URL=..., or build --target cuda."""


def main() -> int:
    """Return 0, or 1 with a sentence."""
    torch = importlib.metadata.distribution("torch")
    if "--cpu-only" in sys.argv and any(line.startswith(("nvidia", "triton")) for line in torch.requires or ()):
        print(_CUDA.format(version=torch.version))
        return 1
    folder = Path(str(torch.locate_file("torch")))
    programs = [path for path in (folder / "bin").glob("*") if path.name != _NEEDED_PROGRAM]
    for path in (*(folder / name for name in _NOT_NEEDED), *programs):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
