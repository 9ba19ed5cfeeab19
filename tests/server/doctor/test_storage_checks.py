"""The cache directory: missing, read only, full, and downloads without room."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from server.doctor import storage_checks
from server.doctor.findings import Level
from server.doctor.storage_checks import check_cache_dir, check_download


def test_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    (found,) = check_cache_dir(tmp_path / "a/b", must_write=True)
    assert found.level is Level.OK and "free" in found.says
    assert list(tmp_path.iterdir()) == [], "looking leaves nothing behind"


@pytest.mark.parametrize(("must_write", "level"), [(True, Level.WARNING), (False, Level.OK)])
def test_a_folder_that_cannot_be_written_to(
    tmp_path: Path, must_write: bool, level: Level, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root may write anywhere, hence no chmod.
    monkeypatch.setattr(storage_checks, "_find_write_problem", lambda folder: "Read-only file system")
    (found,) = check_cache_dir(tmp_path, must_write=must_write)
    assert found.level is level and "Read-only file system" in found.says


def test_writing_is_really_tried() -> None:
    assert storage_checks._find_write_problem(Path("/proc")) != ""


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(storage_checks.shutil, "disk_usage", lambda path: usage)
    (found,) = check_cache_dir(tmp_path, must_write=True)
    assert found.level is Level.WARNING and "1000 bytes free" in found.says
    (error,) = check_download(tmp_path / "x", 2000)
    assert error.level is Level.ERROR and "--cache-dir" in error.todo
    assert not list(check_download(tmp_path, 999))


def test_a_file_system_without_exec(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_checks, "_is_noexec", lambda folder: True)
    *_, found = check_cache_dir(tmp_path, must_write=True)
    assert found.level is Level.WARNING and "noexec" in found.says
