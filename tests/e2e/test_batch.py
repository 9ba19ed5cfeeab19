"""`pointsman batch` as a user runs it: a real process, the real model, from a file or through pipes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

_FLAGS = ("--num-kv-blocks", "64", "--max-num-seqs", "2", "--no-enable-chunked-prefill", "--max-model-len", "256")


def test_a_batch_through_pipes(embedded_model: Path) -> None:
    body = {"prompt": "The capital of France is", "max_tokens": 3, "temperature": 0}
    lines = [{"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": body} for number in (1, 2)]
    text = "".join(json.dumps(line) + "\n" for line in lines) + "{\n"
    result = subprocess.run(
        [
            sys.executable,
            "-m",
            "server",
            "batch",
            "-",
            "-",
            str(embedded_model),
            *_FLAGS,
            "--max-num-batched-tokens=256",
        ],
        input=text,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 1, result.stderr
    first, second, bad = [json.loads(line) for line in result.stdout.splitlines()]
    assert [first["custom_id"], second["custom_id"], bad["error"]["code"]] == ["1", "2", "invalid_json"]
    assert "Paris" in first["response"]["body"]["choices"][0]["text"]
    assert first["response"]["body"]["choices"] == second["response"]["body"]["choices"]
    assert "3/3 lines, 1 failed, 6 tokens" in result.stderr
