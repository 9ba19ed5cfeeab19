"""The cases of alert_cases.py as promtool reads them.

    python -m tests.server.monitoring.promtool_file

writes deploy/prometheus/alerts_test.yaml; `promtool test rules` runs it.
"""

from __future__ import annotations

import re
from pathlib import Path

from server.monitoring.alert import Alert
from server.monitoring.alerts import ALERTS
from server.monitoring.series import find_series
from server.monitoring.yaml_text import Yaml, format_yaml
from tests.server.monitoring.alert_cases import CASES, Case

PATH = Path(__file__).parents[3] / "deploy" / "prometheus" / "alerts_test.yaml"
COMMON = {"job": "pointsman", "instance": "server:8000", "model_name": "tiny", "engine": "0"}
_COMMENT = "Made by `python -m tests.server.monitoring.promtool_file`; `promtool test rules alerts_test.yaml` runs it."
_BY_NAME = {alert.name: alert for alert in ALERTS}


def format_tests() -> str:
    """Return the file."""
    tests: list[Yaml] = [_build_test(case) for case in CASES]
    return format_yaml({"rule_files": ["alerts.yaml"], "evaluation_interval": "1m", "tests": tests}, _COMMENT)


def _build_test(case: Case) -> dict[str, Yaml]:
    alert = _BY_NAME[case.alert]
    expected: list[Yaml] = []
    if case.shown is not None:
        expected = [{"exp_labels": _build_labels(case, alert), "exp_annotations": _render(alert, case.shown)}]
    name = f"{case.alert}: {case.what}, {'fires' if expected else 'is quiet'}"
    series: list[Yaml] = [{"series": _label_series(series), "values": values} for series, values in case.series.items()]
    rule: dict[str, Yaml] = {"eval_time": f"{case.minute}m", "alertname": alert.full_name, "exp_alerts": expected}
    return {"name": name, "interval": "1m", "input_series": series, "alert_rule_test": [rule]}


def _label_series(text: str) -> str:
    name, _, own = text.partition("{")
    row = find_series(name).row
    common = [f'{label}="{value}"' for label, value in COMMON.items() if row.has_model_labels or label in _SCRAPED]
    return f"{name}{{{', '.join(filter(None, (own.removesuffix('}'), *common)))}}}"


_SCRAPED = ("job", "instance")


def _build_labels(case: Case, alert: Alert) -> dict[str, Yaml]:
    return {**{label: COMMON[label] for label in case.labels}, **dict(case.more), "severity": alert.severity}


def _render(alert: Alert, shown: str) -> dict[str, Yaml]:
    """The annotations as Prometheus shows them."""
    summary = alert.summary.replace("{{ $labels.instance }}", COMMON["instance"])
    return {**alert.annotations, "summary": re.sub(r"\{\{[^}]*\$value[^}]*\}\}", shown, summary)}


if __name__ == "__main__":
    PATH.write_text(format_tests(), encoding="utf-8")
    print(PATH)
