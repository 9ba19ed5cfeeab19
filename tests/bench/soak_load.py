"""What a soak asks for: the storm's kinds, and long prompts, longer answers and priorities beside them."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from tests.long.storm import CHAT, Plan, draw_plan

# With --max-model-len 2048 and prompts of about 1,400 tokens, several chunks each.
FLAGS = (
    *("--max-model-len", "2048", "--num-kv-blocks", "96", "--max-num-seqs", "32"),
    *("--scheduling-policy", "priority"),
)
_WORDS = ("the", "old", "house", "at", "the", "end", "of", "the", "road", "where", "nobody", "lived", "for", "years")
_LONG_WORDS = 1300
# Longer than this context: the storm's own is smaller.
_TOO_LONG = "word " * 3000


def draw_soak_plan(rng: random.Random, number: int) -> Plan:
    """Draw one request: one in twelve long, one in six with an answer of some length, one in three with a priority."""
    plan = draw_plan(rng, number)
    body = dict(plan.body)
    if plan.is_bad:
        is_long = len(str(body.get("prompt", ""))) > 1000
        return Plan(plan.path, {**body, "prompt": _TOO_LONG} if is_long else body, is_bad=True)
    if rng.random() < 1 / 12:
        _set_prompt(body, plan.path, _long_text(rng))
        body.pop("echo", None)
    if rng.random() < 1 / 6:
        body["max_tokens"] = rng.randint(32, 160)
    if rng.random() < 1 / 3:
        body["priority"] = rng.choice((-1, 1, 5))
    return Plan(plan.path, body, plan.leaves_after_s, plan.leaves_after_events)


def iter_plans(rng: random.Random, first: int, seconds: float) -> Iterator[Plan]:
    """Yield requests until the time is over.

    Args:
        rng: Draws them.
        first: Number of the first.
        seconds: From the first one on.
    """
    deadline = time.monotonic() + seconds
    number = first
    while time.monotonic() < deadline:
        yield draw_soak_plan(rng, number)
        number += 1


def _set_prompt(body: dict[str, object], path: str, text: str) -> None:
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = text


def _long_text(rng: random.Random) -> str:
    # Some begin alike, for the prefix cache.
    shared = " ".join(_WORDS * 20) if rng.random() < 0.5 else ""
    return f"{shared} {' '.join(rng.choices(_WORDS, k=rng.randint(300, _LONG_WORDS) - len(shared.split())))}"
