"""Panel: one picture of the dashboard, as Grafana writes it.

What a metric means and where it is healthy comes from the table of metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from server.metric_row import Healthy, MetricRow
from server.monitoring.promql import Query, build_query

NUM_COLUMNS = 24
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
_LETTERS = "ABCDEFGH"
_IDLE, _GOOD, _ODD, _BAD = "blue", "green", "yellow", "red"


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture.

    Attributes:
        title: As in the alerts' descriptions.
        queries: By legend, which may show labels as {{label}}; in PromQL, R being the window of rates.
        unit: Grafana's name of it.
        kind: stat = one number; name = one legend, whatever the number; timeseries = lines.
        width: Columns of NUM_COLUMNS.
        height: In Grafana's rows.
        healthy: What colours it; see ``build_steps``.
        note: Said before what the table says of the metrics.
        maximum: Of the axis.
    """

    title: str
    queries: Mapping[str, str]
    unit: str
    kind: Literal["stat", "name", "timeseries"] = "timeseries"
    width: int = 8
    height: int = 8
    healthy: Healthy | None = None
    note: str = ""
    maximum: float | None = None

    @property
    def built(self) -> dict[str, Query]:
        """The queries by legend as Grafana gets them."""
        return {
            legend: build_query(text.replace("[R]", "[$__rate_interval]"), _scope)
            for legend, text in self.queries.items()
        }

    def to_grafana(self, panel_id: int, x: int, y: int) -> dict[str, Any]:
        """Return Grafana's description of it.

        Args:
            panel_id: Of its dashboard's own.
            x: Its first column.
            y: Its first row.
        """
        built = self.built
        return {
            "id": panel_id,
            "type": "timeseries" if self._is_lines else "stat",
            "title": self.title,
            "description": self._describe([row for query in built.values() for row in query.rows]),
            "datasource": DATASOURCE,
            "gridPos": {"h": self.height, "w": self.width, "x": x, "y": y},
            "fieldConfig": {"defaults": self._build_defaults(), "overrides": []},
            "options": _LINE_OPTIONS if self._is_lines else _build_stat_options(self.kind),
            "targets": [
                {"refId": letter, "datasource": DATASOURCE, "expr": query.text, "legendFormat": legend, "range": True}
                for letter, (legend, query) in zip(_LETTERS, built.items(), strict=False)
            ],
        }

    @property
    def _is_lines(self) -> bool:
        return self.kind == "timeseries"

    def _build_defaults(self) -> dict[str, Any]:
        steps = build_steps(self.healthy) if self.healthy else [{"color": _GOOD, "value": None}]
        defaults: dict[str, Any] = {
            "unit": self.unit,
            "min": 0,
            "color": {"mode": "palette-classic" if self._is_lines else "thresholds"},
            "thresholds": {"mode": "absolute", "steps": steps},
        }
        if self.maximum is not None:
            defaults["max"] = self.maximum
        if self._is_lines:
            style = "line" if self.healthy else "off"
            defaults["custom"] = {**_LINES, "thresholdsStyle": {"mode": style}}
        else:
            defaults["mappings"] = [_NO_NUMBER]
        return defaults

    def _describe(self, rows: Sequence[MetricRow]) -> str:
        told = {row.name: f"- `{row.name}`: {row.help} {row.tells}".strip() for row in rows}
        return "\n".join([*([self.note, ""] if self.note else []), *told.values()])


def build_steps(healthy: Healthy) -> list[dict[str, Any]]:
    """Return Grafana's thresholds: each colour from its value on, the first from minus infinity."""
    below = _ODD if healthy.is_low_bad else _IDLE
    steps: list[dict[str, Any]] = [{"color": below if healthy.low else _GOOD, "value": None}]
    if healthy.low:
        steps.append({"color": _GOOD, "value": healthy.low})
    if healthy.high < math.inf:
        # A threshold holds from its value on; where nothing at all is healthy, that nothing must stay so.
        steps.append({"color": _ODD, "value": healthy.high or 1e-9})
    if healthy.alarm < math.inf:
        steps.append({"color": _BAD, "value": healthy.alarm})
    return steps


def _build_stat_options(kind: str) -> dict[str, Any]:
    return {
        "colorMode": "value",
        "graphMode": "area" if kind == "stat" else "none",
        "justifyMode": "auto",
        "orientation": "auto",
        "textMode": "value" if kind == "stat" else "name",
        "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False},
    }


def _scope(row: MetricRow) -> str:
    return 'model_name=~"$model_name", instance=~"$instance"' if row.has_model_labels else 'instance=~"$instance"'


# A share of nothing is no number: there has been no traffic.
_NO_NUMBER = {"type": "special", "options": {"match": "nan", "result": {"index": 0, "text": "–"}}}
_LINES = {
    "drawStyle": "line",
    "lineWidth": 1,
    "fillOpacity": 8,
    "showPoints": "never",
    "spanNulls": False,
    "axisPlacement": "auto",
}
_LINE_OPTIONS = {
    "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
    "tooltip": {"mode": "multi", "sort": "desc"},
}
