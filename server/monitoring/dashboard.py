"""The Grafana dashboard: sections laid out line by line, and what can be chosen at its head."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

from server.monitoring.panel import DATASOURCE, NUM_COLUMNS, Panel
from server.monitoring.panels import Section
from server.monitoring.rest import build_sections
from server.monitoring.series import find_row

UID = "pointsman"
# Of the dashboard format, not of Grafana: what Grafana 10 and 11 write.
_SCHEMA_VERSION = 39


def format_dashboard() -> str:
    """Return the dashboard's JSON."""
    return json.dumps(build_dashboard(build_sections()), indent=2, ensure_ascii=False) + "\n"


def build_dashboard(sections: Sequence[Section]) -> dict[str, Any]:
    """Return the dashboard as Grafana reads it.

    Args:
        sections: From the top.
    """
    return {
        "uid": UID,
        "title": "Pointsman",
        "description": "Made by python -m server.monitoring; colours are the healthy ranges of the table of metrics.",
        "tags": ["pointsman", "vllm", "llm"],
        "schemaVersion": _SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": _build_variables()},
        "panels": list(_lay_out(sections)),
    }


def _lay_out(sections: Sequence[Section]) -> Iterator[dict[str, Any]]:
    ids, y = itertools.count(1), 0
    for section in sections:
        head = {
            "id": next(ids),
            "type": "row",
            "title": section.title,
            "collapsed": section.is_folded,
            "gridPos": {"h": 1, "w": NUM_COLUMNS, "x": 0, "y": y},
            "panels": [],
        }
        panels, end = _place(section.panels, ids, y + 1)
        if section.is_folded:
            yield {**head, "panels": panels}
            y += 1
        else:
            yield head
            yield from panels
            y = end


def _place(panels: Sequence[Panel], ids: Iterator[int], y: int) -> tuple[list[dict[str, Any]], int]:
    """Place panels from the left, a new line where one does not fit; return them and the row after the last."""
    placed, x, height = [], 0, 0
    for panel in panels:
        if x + panel.width > NUM_COLUMNS:
            x, y, height = 0, y + height, 0
        placed.append(panel.to_grafana(next(ids), x, y))
        x, height = x + panel.width, max(height, panel.height)
    return placed, y + height


def _build_variables() -> list[dict[str, Any]]:
    row = find_row("vllm:num_requests_running").name
    asked = (
        ("model_name", "Model", f"label_values({row}, model_name)"),
        ("instance", "Server", f'label_values({row}{{model_name=~"$model_name"}}, instance)'),
    )
    chosen = {"type": "datasource", "name": "datasource", "label": "Prometheus", "query": "prometheus", "refresh": 1}
    return [chosen, *(_build_variable(*each) for each in asked)]


def _build_variable(name: str, label: str, query: str) -> dict[str, Any]:
    return {
        "type": "query",
        "name": name,
        "label": label,
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
        "multi": True,
        "includeAll": True,
        "current": {"text": ["All"], "value": ["$__all"]},
    }
