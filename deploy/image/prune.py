"""Removes from an installed torch, and from FlashInfer, what only compiling needs: 190 MB and 440. In its environment.

With --cpu-only it first makes sure that this is torch's CPU build, which not every package index has. With --modules
DIR it puts FlashInfer's compiled modules where they are loaded from, and tells of every requirement that is not met,
but for those of FlashInfer's that Pointsman has no use for.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

_NOT_NEEDED = ("include", "share", "test")
_NEEDED_PROGRAM = "torch_shm_manager"  # which torch.multiprocessing starts; beside it are tests and protoc
_CUDA = """The package index gave torch {version}, a CUDA build of several GB, for the image that computes on CPUs.
Point pip at PyTorch's CPU index, by --build-arg PIP_EXTRA_INDEX_URL=..., or build --target cuda."""


# Whoever plans a step has FlashInfer render its templates, compiled modules or not; they lie right in csrc.
_FLASHINFER_SOURCES = ("cccl", "cutlass", "include", "spdlog")


def main() -> int:
    """Return 0, or 1 with a sentence."""
    torch = importlib.metadata.distribution("torch")
    if "--cpu-only" in sys.argv and any(line.startswith(("nvidia", "triton")) for line in torch.requires or ()):
        print(_CUDA.format(version=torch.version))
        return 1
    prune_torch(Path(str(torch.locate_file("torch"))))
    if "--modules" in sys.argv:
        modules = Path(sys.argv[sys.argv.index("--modules") + 1])
        if any(modules.iterdir()):
            package = importlib.metadata.distribution("flashinfer-python").locate_file("flashinfer")
            install_modules(modules, Path(str(package)) / "data")
        return check_requirements()
    return 0


def prune_torch(folder: Path) -> None:
    """Remove tests, headers and programs of the torch in a folder."""
    programs = [path for path in (folder / "bin").glob("*") if path.name != _NEEDED_PROGRAM]
    for path in (*(folder / name for name in _NOT_NEEDED), *programs):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


def install_modules(modules: Path, data: Path) -> None:
    """Copy compiled modules to where FlashInfer loads them from blindly, and remove what they were compiled from."""
    shutil.copytree(modules, data / "aot", dirs_exist_ok=True)
    for path in (*(data / name for name in _FLASHINFER_SOURCES), *(data / "csrc").glob("*/")):
        shutil.rmtree(path, ignore_errors=True)


def check_requirements() -> int:
    """Return 1 and print what pip finds missing; FlashInfer asks for packages that only other kernels use."""
    said = subprocess.run([sys.executable, "-m", "pip", "check"], capture_output=True, text=True, check=False).stdout
    missing = [line for line in said.splitlines() if not line.startswith(("flashinfer-python ", "No broken"))]
    print("\n".join(missing))
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
