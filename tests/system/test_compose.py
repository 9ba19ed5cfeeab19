"""compose.yaml through the real docker-compose: it parses, and what it resolves to is what was meant."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.system.deploy_tools import ROOT, run
from tests.system.tools import need_program


@pytest.fixture
def deploy(tmp_path: Path) -> Path:
    """deploy/ as somebody has it who has made the secrets."""
    need_program("docker-compose", "docker-compose")
    folder = tmp_path / "deploy"
    shutil.copytree(ROOT / "deploy", folder, ignore=shutil.ignore_patterns("secrets"))
    run(str(folder / "make-secrets.sh"))
    return folder


def resolve(deploy: Path, *files: str, **variables: str) -> dict[str, Any]:
    arguments = [argument for name in files for argument in ("-f", str(deploy / name))]
    environment = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": str(deploy), **variables}
    result = run("docker-compose", *arguments, "config", environment=environment, cwd=deploy)
    config: dict[str, Any] = yaml.safe_load(result.stdout)
    return config


def test_it_resolves(deploy: Path) -> None:
    config = resolve(deploy, "compose.yaml")
    server = config["services"]["pointsman"]
    assert config["services"].keys() == {"pointsman", "prometheus", "grafana"}
    assert server["image"] == "pointsman:cpu"
    assert server["build"]["target"] == "cpu"
    assert server["read_only"] is True
    assert server["cap_drop"] == ["ALL"]
    # What is not set where compose runs is not set in the container: an empty name would be no model's.
    assert not server["environment"].get("POINTSMAN_MODEL")
    assert Path(config["secrets"]["api-keys"]["file"]).is_file()


def test_what_is_set_outside_gets_in(deploy: Path) -> None:
    config = resolve(deploy, "compose.yaml", POINTSMAN_MODEL="org/name", HTTP_PORT="9000", CPUS="2", MEMORY="4g")
    server = config["services"]["pointsman"]
    assert server["environment"]["POINTSMAN_MODEL"] == "org/name"
    assert "9000" in str(server["ports"])
    assert str(server["mem_limit"]) in {"4g", "4294967296"}


def test_the_cuda_file_changes_image_and_devices_only(deploy: Path) -> None:
    plain = resolve(deploy, "compose.yaml")["services"]["pointsman"]
    cuda = resolve(deploy, "compose.yaml", "compose.cuda.yaml")["services"]["pointsman"]
    assert cuda["image"] == "pointsman:cuda"
    assert cuda["build"]["target"] == "cuda"
    (device,) = cuda["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    changed = {name for name in cuda.keys() | plain.keys() if cuda.get(name) != plain.get(name)}
    assert changed == {"image", "build", "deploy"}
