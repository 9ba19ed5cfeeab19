"""The report in words and as JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from engine_core import EnginePhase, EngineState
from server.doctor.findings import Finding, Level, error, note, ok, warning
from server.doctor.report import Diagnosis, diagnosis_as_json, format_diagnosis
from server.startup_report import format_memory

STATE = EngineState(
    phase=EnginePhase.READY,
    detail="half of the free memory",
    num_blocks=256,
    block_size=64,
    max_model_len=8192,
    weights_bytes=100 << 20,
    kv_bytes=257 << 20,
)


def create_diagnosis(*findings: Finding, **overrides: Any) -> Diagnosis:
    plain: dict[str, Any] = {
        "version": "1",
        "model_name": "Tiny",
        "model_path": "/m.gguf",
        "architecture": "LlamaForCausalLM",
        "download_bytes": 0,
        "kernels": "cpu",
        "threads": "2 threads",
        "numbers": "weights bf16",
        "available_bytes": 3 << 30,
        "state": STATE,
        "weights_bytes": STATE.weights_bytes,
        "longest_model_len": 8192,
        "findings": findings,
    }
    return Diagnosis(**{**plain, **overrides})


def test_what_fits_is_told_in_the_words_of_the_start() -> None:
    text = format_diagnosis(create_diagnosis(ok("port", "free")))
    assert format_memory(STATE) in text
    assert "longest context that fits: 8,192 tokens" in text
    assert text.endswith("It fits, with room for 2.0 requests of full length at once.")


@pytest.mark.parametrize(
    ("findings", "worst", "verdict"),
    [
        ([], Level.OK, "at once."),
        ([note("a", "b")], Level.NOTE, "at once."),
        ([warning("a", "b", "C."), ok("d", "e")], Level.WARNING, "at once; 1 warning above."),
        ([warning("a", "b", "C."), error("d", "e", "F.")], Level.ERROR, "It will not run: 1 error above."),
    ],
)
def test_the_verdict(findings: list[Finding], worst: Level, verdict: str) -> None:
    diagnosis = create_diagnosis(*findings)
    assert diagnosis.worst is worst
    assert format_diagnosis(diagnosis).endswith(verdict)


def test_findings_are_wrapped_and_say_what_to_do() -> None:
    text = format_diagnosis(create_diagnosis(warning("swap", "word " * 60, "Do this.")))
    assert "  WARN   swap: word" in text and "         > Do this." in text
    assert max(map(len, text.splitlines())) <= 120


def test_what_is_still_to_be_downloaded() -> None:
    unknown = {"model_path": "", "state": None, "weights_bytes": None, "kernels": "", "longest_model_len": 0}
    text = format_diagnosis(create_diagnosis(download_bytes=93_000_000, **unknown))
    assert "to be downloaded: 89 MiB" in text and text.endswith("Whether it fits cannot be said yet.")
    assert diagnosis_as_json(create_diagnosis(download_bytes=None, **unknown), 1)["fits"] is None


def test_as_json() -> None:
    found = json.loads(json.dumps(diagnosis_as_json(create_diagnosis(warning("a", "b", "C."), ok("d", "e")), 1)))
    assert found["fits"] is True and found["exit_code"] == 1
    assert found["memory"]["kv_tokens"] == 256 * 64 and found["memory"]["full_length_requests"] == 2.0
    assert found["findings"] == [
        {"level": "warning", "topic": "a", "says": "b", "todo": "C."},
        {"level": "ok", "topic": "d", "says": "e", "todo": None},
    ]
    small = replace(create_diagnosis(), state=None)
    assert diagnosis_as_json(small, 65)["fits"] is False
