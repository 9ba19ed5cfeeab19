"""The doctor's forecast of the embedded model beside what serve then prints, each in a process of its own."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.server_process import ServerProcess

# What serve prints once it is ready.
_MEMORY = re.compile(r"weights +([\d,]+) MiB\s+KV cache +([\d,]+) MiB.*\s+holds +([\d,]+) tokens")


def read_memory(output: str) -> tuple[int, ...]:
    """Return weights and KV cache in MiB, and the tokens that the cache holds."""
    match = _MEMORY.search(output)
    assert match is not None, output
    return tuple(int(number.replace(",", "")) for number in match.groups())


def check_forecast(*flags: str) -> None:
    """Compare what the doctor says of the embedded model with what serve then prints."""
    # So many full-length requests fit anywhere; the free memory of a busy machine changes from second to second.
    flags = (*flags, "--max-num-seqs", "2")
    doctor = [sys.executable, "-m", "server", "doctor", *flags, "--port", "0", "--json"]
    asked = subprocess.run(doctor, capture_output=True, text=True, timeout=120, check=False)
    assert asked.returncode in (0, 1), asked.stdout + asked.stderr
    memory = json.loads(asked.stdout)["memory"]
    with ServerProcess(*flags, "--log-format", "human") as server:
        server.wait_until(lambda: _MEMORY.search(server.output) is not None, 10)
        printed = read_memory(server.output)
    foretold = (memory["weights_bytes"] / 2**20, memory["kv_bytes"] / 2**20, memory["kv_tokens"])
    assert printed == pytest.approx(foretold, rel=0.05)


def test_serve_prints_what_the_doctor_said(embedded_model: Path) -> None:
    check_forecast("--quantization", "int4", "--kv-cache-dtype", "int8")
