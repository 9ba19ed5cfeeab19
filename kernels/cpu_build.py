"""Finds the C++ kernels ready to load, or builds them: a few seconds, once for each compiler, CPU and version of them.

Needs nothing but the standard library: installing runs it too. ``python -m kernels.cpu_build`` builds ahead of use.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from kernels.cache_dir import default_cache_dir
from kernels.cpu_compiler import (
    COMMON_FLAGS,
    SOURCES,
    UNITS,
    BuildError,
    Compiler,
    Host,
    compile_library,
    find_compiler,
)

Progress = Callable[[str], None]

LIBRARY_NAME = "libpointsman_cpu.so"
_DIGEST_NAME = "sha256"
_SCRATCH_PREFIX = ".build-"
# Object files and library are some 5 MB.
_ROOM_BYTES = 32 << 20
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
# Where installing puts a library: beside the sources, which it must have been built from.
INSTALLED = SOURCES / "built"


@dataclass(frozen=True, slots=True)
class FoundLibrary:
    """What came of looking for the library.

    Attributes:
        path: The file to load, or None.
        reason: Why there is none, as the end of a sentence.
        is_temporary: Nobody else will use it: its folder can go once it is loaded.
    """

    path: Path | None
    reason: str = ""
    is_temporary: bool = False


def find_library(
    *,
    cache_dir: Path | None = None,
    progress: Progress = lambda line: None,
    host: Host | None = None,
    installed: Path = INSTALLED,
    may_build: bool = True,
) -> FoundLibrary:
    """Return the library that was installed or built before, or build it.

    Safe against other processes that do the same: one builds, the others wait for it. Never raises.

    Args:
        cache_dir: Where it is built; None = the user's cache.
        progress: Gets a line when it is built.
        host: What it is built for; None = this machine.
        installed: Where an installed one would be.
        may_build: Else only look, and where there is none say that it is still to be built.
    """
    host = Host.this() if host is None else host
    if not host.is_supported:
        return FoundLibrary(None, f"they are written for Linux on x86-64, and this is {host.system} on {host.machine}")
    if _is_intact(installed, _source_digest()):
        return FoundLibrary(installed / LIBRARY_NAME)
    try:
        compiler = find_compiler(host)
        folder = (cache_dir or default_cache_dir()) / f"cpu-{_key(compiler, host)}"
        if _is_closed(folder) and _is_intact(folder):
            return FoundLibrary(folder / LIBRARY_NAME)
        if not may_build:
            return FoundLibrary(None, f"the first start builds them with {compiler.name}, in about 20 s")
        return _build_cached(folder, compiler, progress)
    except (BuildError, OSError, RuntimeError) as error:  # RuntimeError: this user has no home for a cache
        return FoundLibrary(None, str(error))


def install_library(folder: Path, *, host: Host | None = None) -> str:
    """Build the library for a package that is being installed.

    Args:
        folder: Gets the library.
        host: What it is built for; None = this machine.

    Returns:
        Why that is not possible, or nothing.
    """
    host = Host.this() if host is None else host
    if not host.is_supported:
        return f"the kernels are written for Linux on x86-64, not {host.system} on {host.machine}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _build(folder, find_compiler(host), _source_digest())
    except (BuildError, OSError) as error:
        return str(error)
    return ""


def _build_cached(folder: Path, compiler: Compiler, progress: Progress) -> FoundLibrary:
    try:
        folder.mkdir(mode=0o755, parents=True, exist_ok=True)
        was_closed = _is_closed(folder)
        if not was_closed:
            _close(folder)
        with _locked(folder / ".lock", progress):
            if not (was_closed and _is_intact(folder)):
                _remove_leftovers(folder)
                _check_room(folder)
                _build_with_progress(folder, compiler, progress)
        return FoundLibrary(folder / LIBRARY_NAME)
    except OSError as error:
        progress(f"{folder.parent} cannot be written to ({error.strerror}), so the next start builds again")
    scratch = Path(tempfile.mkdtemp(prefix="pointsman-cpu-"))
    try:
        _build_with_progress(scratch, compiler, progress)
    except BaseException:
        shutil.rmtree(scratch, ignore_errors=True)
        raise
    return FoundLibrary(scratch / LIBRARY_NAME, is_temporary=True)


def _check_room(folder: Path) -> None:
    # A compiler that runs out of disk says so in its own words, which are no OSError.
    if shutil.disk_usage(folder).free < _ROOM_BYTES:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _build_with_progress(folder: Path, compiler: Compiler, progress: Progress) -> None:
    progress(f"Building the CPU kernels with {compiler.name}, once (about 20 s) ...")
    started = time.perf_counter()
    _build(folder, compiler, "")
    progress(f"Built the CPU kernels in {time.perf_counter() - started:.0f} s")


def _build(folder: Path, compiler: Compiler, built_from: str) -> None:
    """Put the library and its digest into a folder: the digest last, so that half a build is none."""
    with tempfile.TemporaryDirectory(dir=folder, prefix=_SCRATCH_PREFIX) as scratch:
        library = compile_library(compiler, Path(scratch))
        digest = Path(scratch) / _DIGEST_NAME
        digest.write_text(f"{_file_digest(library)} {built_from}")
        os.replace(library, folder / LIBRARY_NAME)
        os.replace(digest, folder / _DIGEST_NAME)


def _is_intact(folder: Path, built_from: str = "") -> bool:
    # Checked at every start: 2 ms, and a damaged library would end the process without a word.
    try:
        return (folder / _DIGEST_NAME).read_text() == f"{_file_digest(folder / LIBRARY_NAME)} {built_from}"
    except (OSError, UnicodeDecodeError):
        return False


def _is_closed(folder: Path) -> bool:
    """Whether only this user, or root, can have put there what this process is about to run."""
    try:
        status = folder.stat()
    except OSError:
        return False
    return status.st_uid in (0, os.geteuid()) and not status.st_mode & _OTHERS_WRITE


def _close(folder: Path) -> None:
    status = folder.stat()
    if status.st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, f"{folder.name} belongs to another user")
    folder.chmod(stat.S_IMODE(status.st_mode) & ~_OTHERS_WRITE)


def _remove_leftovers(folder: Path) -> None:
    """Remove what builds left that were killed; none is under way, as this process holds the lock."""
    for leftover in folder.glob(f"{_SCRATCH_PREFIX}*"):
        shutil.rmtree(leftover, ignore_errors=True)


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    with path.open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("Another process is building the CPU kernels; waiting for it ...")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


# ---------------------------------------------------------------------- what a library depends on
def _key(compiler: Compiler, host: Host) -> str:
    digest = hashlib.sha256(_source_digest().encode())
    digest.update(repr((compiler.command, compiler.version, host.cpu_flags)).encode())
    return digest.hexdigest()[:16]


def _source_digest() -> str:
    digest = hashlib.sha256(repr((COMMON_FLAGS, UNITS)).encode())
    for path in sorted((*SOURCES.glob("*.cpp"), *SOURCES.glob("*.h"))):
        digest.update(f"{path.name} {path.stat().st_size}\n".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> int:
    """Build ahead of use; say in one line what came of it. Never fails: without the library torch computes."""
    found = find_library(progress=print)
    if found.path is None:
        print(f"The CPU kernels cannot be built, so torch will compute, more slowly: {found.reason}")
    elif found.is_temporary:
        shutil.rmtree(found.path.parent, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
