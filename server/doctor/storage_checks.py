"""The cache directory: can it be written to, does what must be downloaded fit, can libraries be loaded from it."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from server.doctor.findings import Finding, error, ok, warning
from server.doctor.units import format_size

# The kernels' object files and library while they are built.
_BUILD_BYTES = 64 * 2**20


def check_cache_dir(cache_dir: Path, *, must_write: bool) -> Iterator[Finding]:
    """Yield what there is to say of the folder for models and kernels.

    Args:
        cache_dir: As configured; need not exist.
        must_write: Something is to be put there: else a folder that is full or read only does no harm.
    """
    existing = _nearest_existing(cache_dir)
    problem = _find_write_problem(existing)
    free = shutil.disk_usage(existing).free
    if problem:
        says, todo = f"{cache_dir} cannot be written to ({problem})", "Make it writable, or name another --cache-dir."
        yield warning("cache", says, todo) if must_write else ok("cache", f"{says}, and need not be")
    elif free < _BUILD_BYTES:
        says = f"{cache_dir} has {format_size(free)} free"
        yield (
            warning("cache", says, "Free space there, or name another --cache-dir.")
            if must_write
            else ok("cache", says)
        )
    else:
        yield ok("cache", f"{cache_dir}: {format_size(free)} free")
    if _is_noexec(existing):
        yield warning(
            "cache",
            f"{existing} is on a file system mounted noexec, from which the kernels cannot be loaded",
            "Mount it with exec, or name another --cache-dir.",
        )


def check_download(folder: Path, num_bytes: int) -> Iterator[Finding]:
    """Yield an error where a download has no room.

    Args:
        folder: Where it goes; need not exist.
        num_bytes: Its size.
    """
    free = shutil.disk_usage(_nearest_existing(folder)).free
    if num_bytes > free:
        yield error(
            "download",
            f"{format_size(num_bytes)} are to be downloaded into {folder}, which has {format_size(free)} free",
            "Free space there, or choose another folder (--cache-dir; HF_HOME for the Hub's files).",
        )


def _nearest_existing(path: Path) -> Path:
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def _find_write_problem(folder: Path) -> str:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            # A full disk takes an empty file, too.
            file.write(b"\0" * 4096)
            file.flush()
    except OSError as failure:
        return failure.strerror or str(failure)
    return ""


def _is_noexec(folder: Path) -> bool:
    flag: int = getattr(os, "ST_NOEXEC", 0)
    return bool(os.statvfs(folder).f_flag & flag)
