"""Alert: one thing that can be wrong with a server, how it shows, and what whoever is woken by it should do."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from server.metric_row import MetricRow
from server.monitoring.promql import Query, build_query
from server.monitoring.yaml_text import Yaml, format_yaml

# Other servers under the same Prometheus show vLLM's names too. ServiceMonitors and the like put words around a job's.
JOB = 'job=~".*pointsman.*"'
_GROUP = "pointsman"


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """One rule.

    Attributes:
        name: In capitals and small letters, without the common beginning.
        expr: In PromQL, without the job.
        hold: How long it must hold, such as 5m; "0m" = at once.
        severity: critical = somebody is not served; warning = it will come to that, or is slow; info = can be better.
        summary: A sentence; may show the labels and the value, as Prometheus' templates do.
        description: What it means, where to look.
        runbook: What to do, in this order.
    """

    name: str
    expr: str
    hold: str
    severity: Literal["critical", "warning", "info"]
    summary: str
    description: str
    runbook: tuple[str, ...]

    @property
    def full_name(self) -> str:
        """As Prometheus knows it."""
        return f"Pointsman{self.name}"

    @property
    def query(self) -> Query:
        """The expression as Prometheus gets it."""
        return build_query(self.expr, _scope)

    @property
    def annotations(self) -> dict[str, str]:
        """What Prometheus hands on with the alert."""
        steps = "\n".join(f"{number}. {step}" for number, step in enumerate(self.runbook, 1))
        return {"summary": self.summary, "description": self.description, "runbook": steps}


def format_alerts(alerts: Sequence[Alert], comment: str) -> str:
    """Return Prometheus' rule file.

    Args:
        alerts: In the order in which they are shown.
        comment: At its head.
    """
    rules: list[Yaml] = [
        {
            "alert": alert.full_name,
            "expr": alert.query.text,
            "for": alert.hold,
            "labels": {"severity": alert.severity},
            "annotations": alert.annotations,
        }
        for alert in alerts
    ]
    return format_yaml({"groups": [{"name": _GROUP, "rules": rules}]}, comment)


def format_runbook(alerts: Sequence[Alert], comment: str) -> str:
    """Return the same for people, in Markdown.

    Args:
        alerts: In the order in which they are shown.
        comment: Said after the title.
    """
    parts = [f"# When an alert fires\n\n{comment}\n"]
    for alert in alerts:
        steps = "\n".join(f"{number}. {step}" for number, step in enumerate(alert.runbook, 1))
        when = "at once" if alert.hold == "0m" else f"after {alert.hold}"
        parts.append(
            f"## {alert.full_name}\n\n{alert.severity}, {when}: {_show_plainly(alert.summary)}\n\n"
            f"{alert.description}\n\n{steps}\n\n```promql\n{alert.query.text}\n```\n"
        )
    return "\n".join(parts)


def _show_plainly(summary: str) -> str:
    return re.sub(r"\{\{.*?\}\}", "…", summary.replace("{{ $labels.instance }}", "a server"))


def _scope(row: MetricRow) -> str:
    return JOB
