"""Which kernels and threads, and why, in words."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_core import CudaCard, CudaSurvey, DeviceConfig, EngineConfig, MachineSurvey, ModelConfig, survey_machine
from server.doctor.findings import Level
from server.doctor.kernel_checks import check_choice, check_cuda, check_survey, describe_kernels, describe_threads


def create_survey(*, online: int = 8, allowed: int = 8, quota: float | None = None, **overrides: Any) -> MachineSurvey:
    real = survey_machine()
    threads = replace(real.threads, num_online=online, num_allowed=allowed, quota=quota)
    plain = {
        "system": "Linux on x86_64",
        "is_supported": True,
        "cpu_flags": ("avx2", "fma"),
        "compiler": "g++ 12",
        "compiler_problem": "",
        "library": Path("/cache/lib.so"),
        "library_problem": "",
    }
    return replace(real, threads=threads, **{**plain, **overrides})  # type: ignore[arg-type]


def create_config(**device: Any) -> EngineConfig:
    return EngineConfig(ModelConfig(Path("m")), device=DeviceConfig(**{"num_threads": 8, "cpu_isa": "avx2", **device}))


@pytest.mark.parametrize(
    ("survey", "asked", "says"),
    [
        (create_survey(), 0, "8 threads, one for each core"),
        (create_survey(allowed=2), 0, "on 2 of 8 cores (CPU affinity)"),
        (create_survey(quota=1.5), 0, "the time of 1.5 cores"),
        (create_survey(allowed=2), 8, "as --num-threads says; the machine could keep 2 busy"),
    ],
)
def test_why_so_many_threads(survey: MachineSurvey, asked: int, says: str) -> None:
    assert says in describe_threads(create_config(), survey, asked)


def test_why_these_kernels() -> None:
    assert "C++ kernels for avx2: the quickest" in describe_kernels(create_config(), "", "auto")
    assert "as --cpu-isa says" in describe_kernels(create_config(), "", "avx2")
    assert "for its head_dim is odd" in describe_kernels(create_config(cpu_isa="torch"), "its head_dim is odd", "auto")


@pytest.mark.parametrize(
    ("overrides", "level", "says"),
    [
        ({}, Level.OK, "built: /cache/lib.so"),
        (
            {"library": None, "library_problem": "the first start builds them"},
            Level.NOTE,
            "the first start builds them",
        ),
        ({"library": None, "compiler": "", "compiler_problem": "no c++"}, Level.WARNING, "cannot be built: no c++"),
        ({"is_supported": False, "library": None, "library_problem": "this is a Mac"}, Level.WARNING, "this is a Mac"),
        ({"compiler": "", "compiler_problem": "no c++"}, Level.OK, "built: /cache/lib.so"),
    ],
)
def test_what_the_machine_offers(overrides: dict[str, Any], level: Level, says: str) -> None:
    cpu, kernels, *_ = check_survey(create_survey(**overrides))
    assert cpu.says == "Linux on x86_64: avx2, fma"
    assert kernels.level is level and says in kernels.says


def test_threads_that_cannot_be_kept_busy() -> None:
    (found,) = check_choice(create_config(num_threads=16), create_survey(), asked_threads=16)
    assert found.level is Level.WARNING and "only 8 can be kept busy" in found.says


def test_many_cores_that_may_not_be_used() -> None:
    (found,) = check_choice(create_config(), create_survey(online=64, allowed=4), asked_threads=0)
    assert found.level is Level.NOTE and "4 of the machine's 64 cores" in found.says
    assert not list(check_choice(create_config(), create_survey(), asked_threads=0))


def test_plain_code_is_slow() -> None:
    (found,) = check_choice(create_config(cpu_isa="generic"), create_survey(), asked_threads=0)
    assert found.level is Level.WARNING and "no AVX2" in found.says


H200 = CudaCard("NVIDIA H200", (9, 0), 139 << 30)
T4 = CudaCard("Tesla T4", (7, 5), 15 << 30)
WHOLE = CudaSurvey("13.0", "580.65.06", (H200,), "0.7.4")


@pytest.mark.parametrize(
    ("survey", "asked", "level", "says"),
    [
        (
            WHOLE,
            "auto",
            Level.OK,
            "NVIDIA H200, 139 GiB, compute capability 9.0; driver 580.65.06, torch for CUDA 13.0, FlashInfer 0.7.4",
        ),
        (replace(WHOLE, cards=(H200, T4)), "cuda", Level.OK, "the first of 2: CUDA_VISIBLE_DEVICES chooses"),
        (WHOLE, "cpu", Level.NOTE, "NVIDIA H200.* not used, as --backend cpu asks for the CPU"),
        (replace(WHOLE, flashinfer=""), "cpu", Level.NOTE, "NVIDIA H200.* not used, as --backend cpu asks for the CPU"),
        (replace(WHOLE, flashinfer=""), "auto", Level.WARNING, "H200.* do not compute: flashinfer is not installed$"),
        (replace(WHOLE, cards=(T4,)), "auto", Level.WARNING, "do not compute: .* 7.5, and the kernels need 8.0$"),
        (replace(WHOLE, cards=()), "auto", Level.NOTE, "none, although there is an NVIDIA driver .580.65.06.: torch"),
        (CudaSurvey(flashinfer="0.7.4"), "auto", Level.OK, "none: torch is a build for the CPU$"),
    ],
)
def test_which_cards_there_are_and_why_none_computes(survey: CudaSurvey, asked: str, level: Level, says: str) -> None:
    (found,) = check_cuda(survey, backend=asked)
    assert (found.topic, found.level) == ("card", level)
    assert re.search(says, found.says), found.says
    assert (found.todo == "") == (level is Level.OK or asked == "cpu")


def test_an_instruction_set_asks_for_the_cpu_unless_the_card_is_asked_for_by_name() -> None:
    (found,) = check_cuda(WHOLE, cpu_isa="avx2")
    assert found.level is Level.NOTE and "not used, as --cpu-isa avx2 asks for the CPU" in found.says
    (found,) = check_cuda(WHOLE, backend="cuda", cpu_isa="avx2")
    assert found.level is Level.OK, "serve refuses the two together, and says so"


def test_what_to_do_about_a_missing_library_is_told() -> None:
    (found,) = check_cuda(replace(WHOLE, flashinfer=""))
    assert found.todo == 'Run: pip install "pointsman[cuda]"'


def test_a_card_computes_with_flashinfers_kernels() -> None:
    assert "FlashInfer's kernels on the card" in describe_kernels(create_config(backend="cuda"), "", "auto")
