"""What the status page is told: one JSON value a second. Pure; which metric each figure is stands in ONE table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine_core import CACHED, BlockMap, EngineSnapshot, EngineState, RequestSnapshot
from server.status.error_log import LoggedError
from server.status.history import Durations, SecondFigures, StepFigures

# As many cells as a map of a legible size has room for.
MAX_CELLS = 1024
_LATENCY_WINDOW_S = 60

# The page's figures, each read where /metrics reads it.
FIGURES: Mapping[str, tuple[str, ...]] = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "kv_usage": ("vllm:kv_cache_usage_perc",),
    "prompt_tokens_per_s": ("vllm:avg_prompt_throughput_toks_per_s",),
    "output_tokens_per_s": ("vllm:avg_generation_throughput_toks_per_s",),
    "prefix_hit_ratio": ("vllm_prefix_cache_hit_ratio",),
    "prompt_tokens": ("vllm:prompt_tokens_total",),
    "output_tokens": ("vllm:generation_tokens_total",),
    "preemptions": ("vllm:num_preemptions_total",),
    "ended_stop": ("vllm:request_success_total", "stop"),
    "ended_length": ("vllm:request_success_total", "length"),
    "ended_abort": ("vllm:request_success_total", "abort"),
    "ended_error": ("vllm:request_success_total", "error"),
}


class FigureSource(Protocol):
    """Where the figures come from."""

    def get_values(self, metrics: Iterable[Sequence[str]]) -> list[float]:
        """Return what /metrics shows at each of these: a name, and the values of its labels."""


@dataclass(frozen=True, slots=True)
class About:
    """What never changes while the server runs.

    Attributes:
        model: Its name, as served.
        version: Of this server.
        started: When it started, seconds since 1970.
    """

    model: str
    version: str
    started: float


@dataclass(frozen=True, slots=True)
class Present:
    """What is known when a document is made.

    Attributes:
        about: The server.
        phase: In one word.
        state: The engine's.
        uptime_s: Since the start.
        stalled_s: Age of the last progress while there is work, else 0.
        snapshot: The last look at the engine; None before the first.
        snapshot_age_s: How old that is.
        figures: Values of FIGURES.
        steps: The last steps, latest last.
        seconds: The last seconds, latest last.
        errors: The last errors, latest first.
        key_ids: Whose key a request came with, by request id; empty where no key is asked for.
    """

    about: About
    phase: str
    state: EngineState
    uptime_s: float
    stalled_s: float
    snapshot: EngineSnapshot | None
    snapshot_age_s: float
    figures: Mapping[str, float]
    steps: Sequence[StepFigures]
    seconds: Sequence[SecondFigures]
    errors: Sequence[LoggedError]
    key_ids: Mapping[str, str]


def read_figures(source: FigureSource) -> dict[str, float]:
    """Return the value of each of FIGURES now."""
    return dict(zip(FIGURES, source.get_values(FIGURES.values()), strict=True))


def build_document(present: Present) -> dict[str, Any]:
    """Return all that the page shows, but for the block map. Times are in the units that their names say."""
    snapshot = present.snapshot
    return {
        "server": _build_server(present),
        "figures": {name: round(value, 4) for name, value in present.figures.items()},
        "latency": _build_latency(present.seconds),
        "engine": None if snapshot is None else _build_engine(snapshot, present),
        "steps": [
            [step.num_prompt_tokens, step.num_generation_tokens, _to_ms(step.step_time_s)] for step in present.steps
        ],
        "seconds": _build_seconds(present.seconds),
        "errors": [
            {"unix_time": round(error.unix_time, 3), "level": error.level, "text": error.text}
            for error in present.errors
        ],
    }


def build_blocks(blocks: BlockMap, block_size: int, max_cells: int = MAX_CELLS) -> dict[str, Any]:
    """Return the block map; apart, because it takes a while where there are many blocks.

    Args:
        blocks: From a snapshot.
        block_size: Tokens a block.
        max_cells: As many squares as the page has room for.
    """
    owners = blocks.list_owners()
    per_cell, cells = blocks.build_cells(owners, max_cells)
    num_cached = owners.count(CACHED)
    return {
        "total": blocks.num_blocks,
        "used": blocks.num_blocks - blocks.num_free,
        "cached": num_cached,
        "free": blocks.num_free - num_cached,
        "block_size": block_size,
        "per_cell": per_cell,
        "cells": cells,
    }


def _build_server(present: Present) -> dict[str, Any]:
    about, state = present.about, present.state
    return {
        "model": about.model,
        "version": about.version,
        "started": about.started,
        "uptime_s": round(present.uptime_s, 1),
        "phase": present.phase,
        "stalled_s": round(present.stalled_s, 1),
        "detail": state.detail,
        "progress": round(state.progress, 3),
        "max_model_len": state.max_model_len,
    }


def _build_latency(seconds: Sequence[SecondFigures]) -> dict[str, Any]:
    """Of the last minute."""
    first_token, token_gap = Durations(), Durations()
    for second in seconds[-_LATENCY_WINDOW_S:]:
        first_token.merge(second.first_token)
        token_gap.merge(second.token_gap)
    return {"first_token_ms": _build_durations(first_token), "token_gap_ms": _build_durations(token_gap)}


def _build_seconds(seconds: Sequence[SecondFigures]) -> dict[str, list[Any]]:
    """Columns, the latest second last. Of durations, the mean and the longest."""
    return {
        "running": [each.num_running for each in seconds],
        "waiting": [each.num_waiting for each in seconds],
        "kv_usage": [round(each.kv_usage, 4) for each in seconds],
        "prompt_tokens": [each.num_prompt_tokens for each in seconds],
        "output_tokens": [each.num_generation_tokens for each in seconds],
        "prefix_hit_ratio": [_divide(each.num_prefix_hits, each.num_prefix_queries) for each in seconds],
        "first_token_ms": [_build_durations(each.first_token) for each in seconds],
        "token_gap_ms": [_build_durations(each.token_gap) for each in seconds],
    }


def _divide(part: int, whole: int) -> float | None:
    return round(part / whole, 4) if whole else None


def _build_durations(durations: Durations) -> list[float | None]:
    """Mean and longest, in ms; nulls of nothing."""
    mean_s = durations.mean_s
    return [None, None] if mean_s is None else [_to_ms(mean_s), _to_ms(durations.max_s)]


def _build_engine(snapshot: EngineSnapshot, present: Present) -> dict[str, Any]:
    now = snapshot.time + present.snapshot_age_s

    def build(request: RequestSnapshot) -> dict[str, Any]:
        return _build_request(request, now, present.key_ids.get(request.request_id, ""))

    return {
        "age_s": round(present.snapshot_age_s, 2),
        "max_num_seqs": snapshot.max_num_seqs,
        "max_num_batched_tokens": snapshot.max_num_batched_tokens,
        "num_running": snapshot.num_running,
        "num_waiting": snapshot.num_waiting,
        "running": [build(request) for request in snapshot.running],
        "waiting": [build(request) for request in snapshot.waiting],
    }


def _build_request(request: RequestSnapshot, now: float, key_id: str) -> dict[str, Any]:
    num_prompt = request.num_prompt_tokens
    return {
        "id": request.request_id,
        "key_id": key_id,
        "status": request.status,
        "age_s": round(max(0.0, now - request.arrival_time), 1),
        "prompt_tokens": num_prompt,
        "prompt_computed": min(num_prompt, request.num_computed_tokens),
        "prompt_cached": request.num_cached_tokens,
        "output_tokens": request.num_output_tokens,
        "blocks": request.num_blocks,
        "preemptions": request.num_preemptions,
        "waits_for": request.wait_reason,
    }


def _to_ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)
