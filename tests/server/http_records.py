"""HTTP requests that have ended, as the log and the tracer are told of them."""

from __future__ import annotations

from typing import Any

from engine_core import SamplingParams
from server.gap_sample import GapSample
from server.logs.http_record import AnswerNote, HttpRecord
from server.records import RequestRecord
from tests.server.metric_samples import create_record


def create_gaps(*gaps_s: float) -> GapSample:
    gaps = GapSample()
    for gap_s in gaps_s:
        gaps.add(gap_s)
    return gaps


def create_answer(*requests: RequestRecord, **overrides: Any) -> AnswerNote:
    fields: dict[str, Any] = {
        "response_id": "chatcmpl-1",
        "model": "tiny",
        "is_stream": True,
        "params": SamplingParams(max_tokens=40, temperature=0.5, top_p=0.9, seed=7),
        "requests": requests or (create_record(gaps=create_gaps(0.25, 0.25, 0.3)),),
    }
    return AnswerNote(**{**fields, **overrides})


def create_http_record(**overrides: Any) -> HttpRecord:
    """A stream that took 2.75 s, half of a second of them before the engine had it; see create_record."""
    fields: dict[str, Any] = {
        "method": "POST",
        "path": "/v1/chat/completions",
        "start_time": 99.75,
        "end_time": 102.5,
        "status": 200,
        "label": "abc-1",
        "answer": create_answer(),
    }
    return HttpRecord(**{**fields, **overrides})
