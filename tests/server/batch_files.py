"""Files of batch lines."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def build_line(custom_id: str, *, url: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "hi"}]} if url == CHAT else {"prompt": "hi"}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": {**body, "max_tokens": 4, **fields}}


def numbered_lines(num_lines: int) -> list[dict[str, Any]]:
    return [build_line(f"{number}", prompt=[5] * number) for number in range(1, num_lines + 1)]


def write_input(folder: Path, values: Iterable[Any]) -> Path:
    path = folder / "in.jsonl"
    path.write_text("".join(json.dumps(value) + "\n" for value in values))
    return path
