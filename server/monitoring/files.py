"""Every file under deploy/ that is made here, by its path there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from server.monitoring.alert import format_alerts, format_runbook
from server.monitoring.alerts import ALERTS
from server.monitoring.dashboard import format_dashboard
from server.monitoring.yaml_text import Yaml, format_yaml

_MADE = "Made by `python -m server.monitoring deploy/` from the table of metrics; do not edit."
# As compose.yaml calls its services.
_SERVER: Final = "pointsman:8000"
_PROMETHEUS: Final = "http://prometheus:9090"
_DASHBOARDS: Final = "/etc/grafana/dashboards"
_KEY: Final = "/run/secrets/metrics-key"

_CONFIG: Mapping[str, Yaml] = {
    "global": {"scrape_interval": "15s", "evaluation_interval": "15s"},
    "rule_files": ["alerts.yaml"],
    "scrape_configs": [
        {
            "job_name": "pointsman",
            "authorization": {"credentials_file": _KEY},
            "static_configs": [{"targets": [_SERVER]}],
        }
    ],
}
_CONFIG_NOTE = f"""\
{_MADE}
The alerts ask for jobs with "pointsman" in their name. A server without keys needs no authorization."""
_DATASOURCES: Mapping[str, Yaml] = {
    "apiVersion": 1,
    "datasources": [
        {
            "name": "Prometheus",
            "uid": "prometheus",
            "type": "prometheus",
            "access": "proxy",
            "url": _PROMETHEUS,
            "isDefault": True,
            # From it Grafana takes the windows of rates.
            "jsonData": {"timeInterval": "15s"},
        }
    ],
}
_PROVIDERS: Mapping[str, Yaml] = {
    "apiVersion": 1,
    "providers": [{"name": "Pointsman", "type": "file", "options": {"path": _DASHBOARDS}}],
}


def build_files() -> dict[str, str]:
    """Return the files' texts by their paths under deploy/."""
    return {
        "grafana/dashboards/pointsman.json": format_dashboard(),
        "grafana/provisioning/dashboards/pointsman.yaml": format_yaml(_PROVIDERS, _MADE),
        "grafana/provisioning/datasources/prometheus.yaml": format_yaml(_DATASOURCES, _MADE),
        "prometheus/alerts.yaml": format_alerts(ALERTS, _MADE),
        "prometheus/prometheus.yml": format_yaml(_CONFIG, _CONFIG_NOTE),
        "prometheus/RUNBOOK.md": format_runbook(ALERTS, f"<!-- {_MADE} -->"),
    }
