"""The chart's sources against the program and each other; what needs helm is tests/system/test_helm.py."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from server.metrics_table import TABLE
from tests.server.fake_engine_client import FakeEngineClient
from tests.server.http_helpers import build_app

ROOT = Path(__file__).parent.parent.parent
CHART = ROOT / "deploy" / "helm" / "pointsman"
TEMPLATES = {path.name: path.read_text() for path in (CHART / "templates").iterdir()}
VALUES: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())


def test_its_version_is_the_projects() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert (chart["version"], chart["appVersion"]) == (version, version)


def test_the_schema_knows_every_value() -> None:
    assert list(unknown_values(VALUES, SCHEMA, "")) == []


def unknown_values(values: dict[str, Any], schema: dict[str, Any], path: str) -> list[str]:
    """Paths of values that the schema, where it lists them all, does not list."""
    properties = schema.get("properties")
    if properties is None:
        return []
    missing = [f"{path}{name}" for name in values if name not in properties]
    for name, value in values.items():
        if isinstance(value, dict) and name in properties:
            missing += unknown_values(value, properties[name], f"{path}{name}.")
    return missing


def test_every_value_is_used() -> None:
    text = "\n".join(TEMPLATES.values())
    assert [name for name in VALUES if f".Values.{name}" not in text] == []


def test_probes_and_scrapes_ask_what_the_server_answers() -> None:
    answered = build_app(FakeEngineClient()).openapi()["paths"]
    asked = {path for text in TEMPLATES.values() for path in re.findall(r"\bpath: (/[a-z]+)\b", text)}
    assert asked == {"/health", "/ready", "/metrics"}
    assert asked <= answered.keys()


def test_settings_cannot_contradict_what_the_chart_sets() -> None:
    reserved = set(SCHEMA["properties"]["settings"]["propertyNames"]["not"]["enum"])
    assert set(re.findall(r"POINTSMAN_([A-Z][A-Z_]+)", TEMPLATES["deployment.yaml"])) - {"PORT"} <= reserved
    assert "PORT" in reserved


def test_it_scales_by_a_metric_that_there_is() -> None:
    assert VALUES["autoscaling"]["metric"] in {row.name for row in TABLE}


def test_alerts_and_dashboard_are_those_of_the_other_deployments() -> None:
    for name, source in (("alerts.yaml", "prometheus"), ("pointsman.json", "grafana/dashboards")):
        assert (CHART / "files" / name).resolve() == ROOT / "deploy" / source / name
        assert (CHART / "files" / name).is_file()
