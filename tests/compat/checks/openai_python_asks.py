"""What the checks of openai-python ask with: one client, and two kinds of request with usual fields."""

from __future__ import annotations

import sys
from typing import Any

from checking import fetch_json, model_name
from openai import OpenAI

URL = sys.argv[1]
MODEL = model_name(URL)
client = OpenAI(base_url=f"{URL}/v1", api_key="unused", max_retries=0, timeout=120)

COUNT: list[Any] = [{"role": "user", "content": "Count from one to one hundred."}]
PROMPT = "The capital of France is"


def chat(**fields: Any) -> Any:
    return client.chat.completions.create(**{"model": MODEL, "messages": COUNT, "temperature": 0, **fields})


def complete(**fields: Any) -> Any:
    return client.completions.create(**{"model": MODEL, "prompt": PROMPT, "temperature": 0, **fields})


def tokenize(text: str) -> list[int]:
    ids: list[int] = fetch_json(f"{URL}/tokenize", {"model": MODEL, "prompt": text})["tokens"]
    return ids
