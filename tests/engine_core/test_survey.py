"""What a machine offers the kernels is told without building any."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from engine_core import CudaCard, CudaSurvey, survey_cuda, survey_machine
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


CARD = CudaCard("NVIDIA H200", (9, 0), 141 << 30)
WHOLE = {"torch_cuda": "13.0", "driver": "580.65.06", "cards": (CARD,), "flashinfer": "0.7.4"}
DRIVER = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build  (root@host)\nGCC version: 12\n"
)


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ({"cards": (), "torch_cuda": ""}, "torch is a build for the CPU: install torch's CUDA build"),
        ({"cards": (), "driver": ""}, "no NVIDIA driver here: use --backend cpu"),
        ({"cards": ()}, "torch, built for CUDA 13.0, sees no card under driver 580.65.06: look at CUDA_VISIBLE"),
        (
            {"cards": (CudaCard("Tesla T4", (7, 5), 1 << 30),)},
            "Tesla T4 has compute capability 7.5, and the kernels need 8.0: use --backend cpu",
        ),
        ({"flashinfer": ""}, 'flashinfer is not installed: pip install "pointsman[cuda]"'),
    ],
)
def test_what_the_cuda_backend_lacks_is_told_with_what_to_do(missing: dict[str, Any], told: str) -> None:
    assert CudaSurvey(**WHOLE).problem == ""
    assert told in CudaSurvey(**{**WHOLE, **missing}).problem


def test_cards_and_their_driver_are_found(tmp_path: Path) -> None:
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(DRIVER)
    found = survey_cuda(tmp_path, lambda: (CARD,))
    assert found.cards == (CARD,) and found.driver == "580.65.06"
    (tmp_path / "proc/driver/nvidia/version").write_text("?")
    assert survey_cuda(tmp_path, tuple).driver == "of unknown version"


def test_a_machine_without_a_driver_has_no_card(tmp_path: Path) -> None:
    found = survey_cuda(tmp_path, tuple)
    assert found.cards == () and found.driver == "" and found.problem


def test_flashinfer_is_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    survey_cuda(tmp_path, tuple)  # torch is there: from here on nothing else is, whatever this machine has installed
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    importlib.invalidate_caches()
    assert survey_cuda(tmp_path, tuple).flashinfer == ""
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer/__init__.py").write_text("raise RuntimeError('imported')")
    importlib.invalidate_caches()
    assert survey_cuda(tmp_path, tuple).flashinfer == "of unknown version"
    (tmp_path / "flashinfer_python-9.8.7.dist-info").mkdir()
    (tmp_path / "flashinfer_python-9.8.7.dist-info/METADATA").write_text("Name: flashinfer-python\nVersion: 9.8.7\n")
    importlib.invalidate_caches()
    assert survey_cuda(tmp_path, tuple).flashinfer == "9.8.7"
