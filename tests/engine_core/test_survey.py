"""What a machine offers the kernels is told without building any."""

from __future__ import annotations

from pathlib import Path

from engine_core import survey_machine
from kernels.cpu_compiler import Host


def write_compiler(folder: Path) -> Path:
    folder.mkdir()
    path = folder / "c++"
    path.write_text("#!/bin/sh\necho fake 1.0\n")
    path.chmod(0o755)
    return folder


def test_a_machine_without_compiler_or_library(tmp_path: Path) -> None:
    host = Host("Linux", "x86_64", "flags : fpu avx2 fma sse2", {"PATH": str(tmp_path)})
    survey = survey_machine(tmp_path / "cache", host)
    assert survey.cpu_flags == ("avx2", "fma")
    assert survey.is_supported and survey.system == "Linux on x86_64"
    assert "there is no C++ compiler" in survey.compiler_problem and survey.compiler == ""
    assert survey.library is None and "there is no C++ compiler" in survey.library_problem


def test_looking_builds_nothing(tmp_path: Path) -> None:
    host = Host("Linux", "x86_64", "", {"PATH": str(write_compiler(tmp_path / "bin"))})
    survey = survey_machine(tmp_path / "cache", host)
    assert survey.compiler == "fake 1.0" and survey.compiler_problem == ""
    assert survey.library is None and "the first start builds them with fake 1.0" in survey.library_problem
    assert not (tmp_path / "cache").exists()


def test_another_system_has_no_kernels(tmp_path: Path) -> None:
    survey = survey_machine(tmp_path, Host("Darwin", "arm64", "", {"PATH": ""}))
    assert not survey.is_supported and "Darwin" in survey.library_problem


def test_this_machine() -> None:
    assert survey_machine().threads.num_threads >= 1
