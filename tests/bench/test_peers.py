"""peers.py as `make bench` runs it, on the tiny checkpoint: two short requests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.model
def test_pointsmans_row_of_a_load_is_printed_and_written(tmp_path: Path) -> None:
    command = [sys.executable, "tests/bench/peers.py", "--smoke", "--repeat", "1", "--only", "W6"]
    command += ["--peer", "pointsman,vllm", "--home", "vllm=/nowhere", "--cache", str(tmp_path)]
    command += ["--json", str(tmp_path / "out.json")]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stderr
    assert "vllm is left out: not installed" in result.stderr
    assert "1/1 done" in result.stderr
    (row,) = (line for line in result.stdout.splitlines() if line.startswith("| W6"))
    assert float(row.split("|")[2].replace(",", "").rstrip("* ")) > 0.0
    (run,) = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert (run["figures"]["num_output_tokens"], run["figures"]["num_prompt_tokens"]) == (16, 64)
