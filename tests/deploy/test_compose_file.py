"""compose.yaml against the tree: what it mounts is there, other machines reach nothing, an end has its time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from server.config import ServerConfig

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
COMPOSE: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_hardened_watched_and_reached_from_this_machine_only(name: str) -> None:
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert service["healthcheck"]["test"][0] == "CMD"
    assert service["logging"]["options"]["max-size"]
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert service.get("privileged", False) is False


@pytest.mark.parametrize("name", SERVICES)
def test_what_a_service_uses_is_declared(name: str) -> None:
    service = SERVICES[name]
    assert set(service["secrets"]) <= COMPOSE["secrets"].keys()
    sources = [volume.split(":")[0] for volume in service["volumes"]]
    assert [source for source in sources if not source.startswith("./") and source not in COMPOSE["volumes"]] == []
    assert [source for source in sources if source.startswith("./") and not (DEPLOY / source).is_dir()] == []


def test_a_container_is_given_longer_than_the_server_drains() -> None:
    (seconds,) = re.fullmatch(r"(\d+)s", SERVICES["pointsman"]["stop_grace_period"]).groups()  # type: ignore[union-attr]
    assert int(seconds) >= ServerConfig().drain_timeout_s + 10


def test_keys_come_from_a_file_that_is_a_secret() -> None:
    service = SERVICES["pointsman"]
    assert service["environment"]["POINTSMAN_API_KEYS_FILE"] == "/run/secrets/api-keys"
    assert service["secrets"] == ["api-keys"]
    assert "POINTSMAN_INSECURE" not in service["environment"]
    ignored = (DEPLOY.parent / ".gitignore").read_text().splitlines()
    folders = {Path(secret["file"]).parent for secret in COMPOSE["secrets"].values()}
    assert {f"deploy/{folder}/" for folder in folders} <= set(ignored)


def test_prometheus_asks_the_server_with_its_key_and_finds_its_rules() -> None:
    config = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (job,) = (each for each in config["scrape_configs"] if each["job_name"] == "pointsman")
    targets = [target for static in job["static_configs"] for target in static["targets"]]
    assert targets == ["pointsman:8000"]
    assert job["authorization"]["credentials_file"] == "/run/secrets/metrics-key"
    assert SERVICES["prometheus"]["secrets"] == ["metrics-key"]
    for name in config["rule_files"]:
        assert (DEPLOY / "prometheus" / Path(name).name).is_file()


def test_grafana_finds_the_dashboard_where_it_is_mounted() -> None:
    mounts = dict(volume.split(":")[:2] for volume in SERVICES["grafana"]["volumes"])
    (provider,) = (DEPLOY / "grafana" / "provisioning" / "dashboards").glob("*.yaml")
    (found,) = yaml.safe_load(provider.read_text())["providers"]
    assert mounts["./grafana/dashboards"] == found["options"]["path"]
    (source,) = (DEPLOY / "grafana" / "provisioning" / "datasources").glob("*.yaml")
    (datasource,) = yaml.safe_load(source.read_text())["datasources"]
    assert datasource["url"] == "http://prometheus:9090"
