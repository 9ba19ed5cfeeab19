from pathlib import Path

import pytest
import yaml

from server.monitoring.__main__ import main
from server.monitoring.files import build_files

DEPLOY = Path(__file__).parents[3] / "deploy"
FILES = build_files()


@pytest.mark.parametrize("name", FILES)
def test_what_is_committed_is_what_would_be_made(name: str) -> None:
    assert (DEPLOY / name).read_text(encoding="utf-8") == FILES[name], "python -m server.monitoring deploy/"


def test_prometheus_reads_the_alerts_and_calls_the_job_as_they_do() -> None:
    config = yaml.safe_load(FILES["prometheus/prometheus.yml"])
    assert [f"prometheus/{name}" in FILES for name in config["rule_files"]] == [True]
    (job,) = config["scrape_configs"]
    assert "pointsman" in job["job_name"]


def test_grafana_finds_the_source_and_the_dashboard() -> None:
    (source,) = yaml.safe_load(FILES["grafana/provisioning/datasources/prometheus.yaml"])["datasources"]
    assert (source["type"], source["isDefault"]) == ("prometheus", True)
    config = yaml.safe_load(FILES["prometheus/prometheus.yml"])
    assert source["jsonData"]["timeInterval"] == config["global"]["scrape_interval"]
    (provider,) = yaml.safe_load(FILES["grafana/provisioning/dashboards/pointsman.yaml"])["providers"]
    assert provider["type"] == "file"


def test_the_command_writes_them_all(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([str(tmp_path / "deploy")])
    written = {
        str(path.relative_to(tmp_path / "deploy")) for path in (tmp_path / "deploy").rglob("*") if path.is_file()
    }
    assert written == set(FILES)
    assert len(capsys.readouterr().out.splitlines()) == len(FILES)
    for name, text in FILES.items():
        assert (tmp_path / "deploy" / name).read_text(encoding="utf-8") == text


def test_nothing_that_serves_imports_it() -> None:
    server = DEPLOY.parent / "server"
    others = [path for path in server.rglob("*.py") if not path.is_relative_to(server / "monitoring")]
    assert others
    assert [path for path in others if "server.monitoring" in path.read_text(encoding="utf-8")] == []
