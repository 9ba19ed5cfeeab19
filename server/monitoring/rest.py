"""Panels of the metrics that none was made for by hand, so that a new row of the table is on the dashboard at once."""

from __future__ import annotations

from collections.abc import Sequence

from server.metric_row import MetricRow
from server.metrics_table import TABLE
from server.monitoring.panel import Panel
from server.monitoring.panels import SECTIONS, Section

# There for whoever asks for vLLM's old names; always the same, or told better by a rate.
_NOT_SHOWN = frozenset(
    {
        "vllm:num_requests_swapped",
        "vllm:cpu_cache_usage_perc",
        "vllm:engine_sleep_state",
        "vllm:avg_prompt_throughput_toks_per_s",
        "vllm:avg_generation_throughput_toks_per_s",
    }
)


def build_sections(sections: Sequence[Section] = SECTIONS, table: Sequence[MetricRow] = TABLE) -> list[Section]:
    """Return the sections, with one of the rows that they leave out after those that are open.

    Args:
        sections: Made by hand.
        table: Of metrics; second names are left out.
    """
    queries = [query for section in sections for panel in section.panels for query in panel.built.values()]
    shown = {row.name for query in queries for row in query.rows} | _NOT_SHOWN
    panels = tuple(_build_panel(row) for row in table if not row.alias_of and row.name not in shown)
    rest = [Section("More", panels)] if panels else []
    # What is folded, nobody scrolls past.
    return [*(each for each in sections if not each.is_folded), *rest, *(each for each in sections if each.is_folded)]


def _build_panel(row: MetricRow) -> Panel:
    legend = " ".join(f"{{{{{label}}}}}" for label in (*row.labels, "instance"))
    if row.kind == "gauge":
        queries = {legend: row.name}
    elif row.kind == "counter":
        queries = {legend: f"rate({row.name}[R])"}
    else:
        by = ", ".join((*row.labels, "instance", "le"))
        queries = {f"p95 {legend}": f"histogram_quantile(0.95, sum by ({by}) (rate({row.name}_bucket[R])))"}
    return Panel(title=row.name, queries=queries, unit="short", healthy=row.healthy)
