"""Snapshots and documents for tests of the status page."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from engine_core import BlockMap, EngineSnapshot, RequestSnapshot
from server.status.document import About, Present, read_figures
from tests.server.fake_engine_client import create_state

ABOUT = About("org/model", "1.2.3", 1_700_000_000.0)


class NoFigures:
    """All figures are 0."""

    def get_values(self, metrics: Iterable[Sequence[str]]) -> list[float]:
        return [0.0 for _ in metrics]


def create_row(request_id: str, **overrides: Any) -> RequestSnapshot:
    """A running request that arrived at 90 and has computed its prompt of 12 tokens."""
    fields: dict[str, Any] = {
        "status": "running",
        "arrival_time": 90.0,
        "num_prompt_tokens": 12,
        "num_computed_tokens": 15,
        "num_output_tokens": 3,
        "num_cached_tokens": 8,
        "num_blocks": 2,
        "num_preemptions": 0,
        "wait_reason": "",
    }
    return RequestSnapshot(request_id, **{**fields, **overrides})


def create_snapshot(*running: RequestSnapshot, waiting: tuple[RequestSnapshot, ...] = ()) -> EngineSnapshot:
    """Taken at 100. Each running request holds the next two of 16 blocks; the last block is cached."""
    tables = [[2 * place + 1, 2 * place + 2] for place in range(len(running))]
    digests = [*[None] * 16, b"digest"]
    return EngineSnapshot(
        time=100.0,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        num_running=len(running),
        num_waiting=len(waiting),
        running=running,
        waiting=waiting,
        blocks=BlockMap(16, 16 - 2 * len(running), tables, digests),
    )


def create_present(**overrides: Any) -> Present:
    """A server that is ready and has done nothing yet."""
    fields: dict[str, Any] = {
        "about": ABOUT,
        "phase": "ready",
        "state": create_state(),
        "uptime_s": 61.25,
        "stalled_s": 0.0,
        "snapshot": None,
        "snapshot_age_s": 0.0,
        "figures": read_figures(NoFigures()),
        "steps": (),
        "seconds": (),
        "errors": (),
        "key_ids": {},
    }
    return Present(**{**fields, **overrides})
