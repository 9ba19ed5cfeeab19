"""The doctor's report, for people and for programs. Pure: gets everything, prints nothing."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine_core import EngineState
from server.doctor.findings import Finding, Level
from server.doctor.units import format_size
from server.startup_report import format_memory, format_rows

_MARKS = {Level.OK: "ok", Level.NOTE: "note", Level.WARNING: "WARN", Level.ERROR: "ERROR"}
_WIDTH = 110
_INDENT = " " * 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """All that was found out.

    Attributes:
        version: Of Pointsman.
        model_name: As served.
        model_path: Where it is on disk, or empty.
        architecture: The checkpoint's own name for it, or empty.
        download_bytes: What must be fetched first; 0 = nothing, None = unknown.
        kernels: What computes and why, in words; empty where that could not be settled.
        threads: How many and why, in words.
        numbers: Of weights and KV cache, in words.
        available_bytes: What may be taken now.
        state: The engine's once it is ready; None = it does not fit, or nobody can say.
        weights_bytes: Memory for the weights; None = nobody can say.
        longest_model_len: The longest context that one request could have, in tokens.
        findings: In the order in which they are told.
    """

    version: str
    model_name: str
    model_path: str
    architecture: str
    download_bytes: int | None
    kernels: str
    threads: str
    numbers: str
    available_bytes: int
    state: EngineState | None
    weights_bytes: int | None
    longest_model_len: int
    findings: Sequence[Finding]

    @property
    def worst(self) -> Level:
        """The worst level of all findings."""
        levels = list(Level)
        return max((finding.level for finding in self.findings), key=levels.index, default=Level.OK)


def format_diagnosis(diagnosis: Diagnosis) -> str:
    """Return the report for people."""
    parts = [format_rows(f"Pointsman {diagnosis.version}, before anything is loaded", _model_rows(diagnosis))]
    if diagnosis.state is not None:
        parts.append(format_memory(diagnosis.state))
        parts.append(f"  longest context that fits: {diagnosis.longest_model_len:,} tokens")
    parts += ["", "Findings", *(_format_finding(finding) for finding in diagnosis.findings), "", _verdict(diagnosis)]
    return "\n".join(parts)


def diagnosis_as_json(diagnosis: Diagnosis, exit_code: int) -> dict[str, Any]:
    """Return the report for programs; sizes in bytes."""
    state = diagnosis.state
    return {
        "version": diagnosis.version,
        "exit_code": exit_code,
        "fits": None if state is None and diagnosis.weights_bytes is None else state is not None,
        "model": {
            "name": diagnosis.model_name,
            "path": diagnosis.model_path or None,
            "architecture": diagnosis.architecture or None,
            "download_bytes": diagnosis.download_bytes,
        },
        "compute": {"kernels": diagnosis.kernels, "threads": diagnosis.threads, "numbers": diagnosis.numbers},
        "memory": {
            "available_bytes": diagnosis.available_bytes,
            "weights_bytes": diagnosis.weights_bytes,
            "longest_model_len": diagnosis.longest_model_len or None,
            **(_state_as_json(state) if state is not None else {}),
        },
        "findings": [
            {"level": str(each.level), "topic": each.topic, "says": each.says, "todo": each.todo or None}
            for each in diagnosis.findings
        ],
    }


def _state_as_json(state: EngineState) -> dict[str, Any]:
    num_tokens = state.num_blocks * state.block_size
    return {
        "kv_bytes": state.kv_bytes,
        "kv_blocks": state.num_blocks,
        "block_size": state.block_size,
        "kv_tokens": num_tokens,
        "max_model_len": state.max_model_len,
        "full_length_requests": round(num_tokens / state.max_model_len, 2),
        "sized_by": state.detail,
    }


def _model_rows(diagnosis: Diagnosis) -> dict[str, str]:
    architecture = f" ({diagnosis.architecture})" if diagnosis.architecture else ""
    rows = {"model": f"{diagnosis.model_name}{architecture}"}
    if diagnosis.model_path:
        rows["files"] = diagnosis.model_path
    elif diagnosis.download_bytes:
        rows["files"] = f"to be downloaded: {format_size(diagnosis.download_bytes)}"
    else:
        rows["files"] = "to be downloaded"
    if diagnosis.kernels:
        rows |= {"kernels": diagnosis.kernels, "threads": diagnosis.threads, "numbers": diagnosis.numbers}
    rows["free memory"] = format_size(diagnosis.available_bytes)
    if diagnosis.state is None and diagnosis.weights_bytes is not None:
        rows["weights"] = format_size(diagnosis.weights_bytes)
    return rows


def _format_finding(finding: Finding) -> str:
    text = f"{finding.topic}: {finding.says}"
    lines = textwrap.wrap(text, _WIDTH, initial_indent=f"  {_MARKS[finding.level]:<7}", subsequent_indent=_INDENT)
    if finding.todo:
        lines += textwrap.wrap(finding.todo, _WIDTH, initial_indent=f"{_INDENT}> ", subsequent_indent=f"{_INDENT}  ")
    return "\n".join(lines)


def _verdict(diagnosis: Diagnosis) -> str:
    counts = {level: sum(finding.level is level for finding in diagnosis.findings) for level in Level}
    if counts[Level.ERROR]:
        return f"It will not run: {_plural(counts[Level.ERROR], 'error')} above."
    worth = f"; {_plural(counts[Level.WARNING], 'warning')} above" if counts[Level.WARNING] else ""
    if diagnosis.state is None:
        return f"Whether it fits cannot be said yet{worth}."
    users = diagnosis.state.num_blocks * diagnosis.state.block_size / diagnosis.state.max_model_len
    return f"It fits, with room for {users:.1f} requests of full length at once{worth}."


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
