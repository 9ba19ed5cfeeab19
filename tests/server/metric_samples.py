"""Figures to record, a row of the table, and reading a page of metrics as a scraper does."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

from engine_core import FinishReason, SchedulerStats
from server.metric_row import Healthy, MetricRow
from server.metrics import ServerMetrics
from server.records import RequestRecord

OURS = ("vllm", "pointsman:", "http_")
STATS = SchedulerStats(
    num_running=3,
    num_waiting=4,
    num_blocks=10,
    num_free_blocks=4,
    num_parked=1,
    num_held_back=2,
    num_scheduled_tokens=107,
    num_prompt_tokens=100,
    num_drafts=3,
    num_draft_tokens=5,
    num_accepted_tokens=(2, 1),
    num_generation_tokens=3,
    num_preempted=1,
    num_prefix_queries=90,
    num_prefix_hits=64,
    num_resumed_queries=40,
    num_resumed_hits=32,
    num_stalls=2,
    num_steps=1,
    num_step_prompt_tokens=60,
    num_step_generation_tokens=3,
    schedule_time_s=0.25,
    update_time_s=0.125,
    step_time_s=0.02,
)
# No field has its default, so that none can be lost unseen.
ROW = MetricRow(
    name="h_total",
    kind="histogram",
    unit="seconds",
    help="Some.",
    labels=("old",),
    values=("x",),
    buckets=(1.0, 2.0),
    tells="Short.",
    healthy=Healthy(high=1),
    alias_of="other",
    has_model_labels=False,
)


def create_record(**overrides: Any) -> RequestRecord:
    """A request that ended after 4 tokens: queued 0.5 s, its prompt computed in 1 s, a token every 0.25 s."""
    figures: dict[str, Any] = {
        "request_id": "r",
        "arrival_time": 100.0,
        "num_prompt_tokens": 12,
        "num_cached_tokens": 8,
        "num_output_tokens": 4,
        "max_tokens": 40,
        "first_scheduled_time": 100.5,
        "first_token_time": 101.5,
        "last_token_time": 102.25,
        "end_time": 102.5,
        "finish_reason": FinishReason.STOP,
    }
    return RequestRecord(**{**figures, **overrides})


def get_changes(before: MetricRow, after: MetricRow) -> dict[str, object]:
    """The fields of ``after`` that ``before`` has otherwise."""
    found = {field.name: getattr(after, field.name) for field in fields(MetricRow)}
    return {name: value for name, value in found.items() if value != getattr(before, name)}


def read_families(metrics: ServerMetrics) -> dict[str, Metric]:
    """The page's families by the name on their TYPE line, those of the process left out."""
    found = {}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        if family.name.startswith(OURS):
            name = family.name + "_total" * (family.type == "counter")
            assert name not in found, f"{name} is on the page twice"
            found[name] = family
    return found


def read_samples(metrics: ServerMetrics) -> dict[tuple[str, str], float]:
    """Every sample of ours by (name, its own labels as text)."""
    found = {}
    for family in read_families(metrics).values():
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name not in ("model_name", "engine")}
            found[sample.name, ",".join(f"{k}={v}" for k, v in sorted(labels.items()))] = sample.value
    return found
