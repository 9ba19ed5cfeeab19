"""The chart through the real helm: linted, templated against committed manifests, and validated as Kubernetes would.

UPDATE_GOLDENS=1 writes the manifests anew.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.system.deploy_tools import ROOT, helm, run
from tests.system.tools import pip_environment

CHART = ROOT / "deploy" / "helm" / "pointsman"
FOLDER = Path(__file__).parent / "helm"
CASES = sorted(path.name.removesuffix(".values.yaml") for path in FOLDER.glob("*.values.yaml"))
# Without schemas of Kubernetes' own.
CUSTOM_KINDS = {"ScaledObject", "ServiceMonitor", "PrometheusRule"}
# Checked apart, and long.
ALERTS, DASHBOARD = "(deploy/prometheus/alerts.yaml)", "(deploy/grafana/dashboards/pointsman.json)"

Manifest = dict[str, Any]


def template(case: str) -> list[Manifest]:
    command = (str(helm()), "template", "release", str(CHART), "--namespace", "serving")
    result = run(*command, "--values", str(FOLDER / f"{case}.values.yaml"))
    return [manifest for manifest in yaml.safe_load_all(result.stdout) if manifest]


def refuse(*settings: str) -> str:
    """Template with settings that must be refused; return why."""
    arguments = [argument for setting in settings for argument in ("--set", setting)]
    command = [str(helm()), "template", "release", str(CHART), *arguments]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode != 0, f"{settings} is taken"
    return result.stderr


def find(manifests: list[Manifest], kind: str) -> Manifest:
    (found,) = (manifest for manifest in manifests if manifest["kind"] == kind)
    return found


# ---------------------------------------------------------------------- every set of values
@pytest.mark.parametrize("case", CASES)
def test_the_chart_lints(case: str) -> None:
    run(str(helm()), "lint", "--strict", str(CHART), "--values", str(FOLDER / f"{case}.values.yaml"))


@pytest.mark.parametrize("case", CASES)
def test_its_manifests_are_those_committed(case: str) -> None:
    manifests = template(case)
    for manifest in manifests:
        if manifest["kind"] == "PrometheusRule":
            manifest["spec"] = ALERTS
        if manifest["metadata"]["name"].endswith("-dashboard"):
            manifest["data"]["pointsman.json"] = DASHBOARD
    text = yaml.safe_dump_all(manifests, sort_keys=False, width=120)
    golden = FOLDER / f"{case}.golden.yaml"
    if os.environ.get("UPDATE_GOLDENS"):
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("case", CASES)
def test_kubernetes_would_take_them(case: str, tmp_path: Path) -> None:
    known = [manifest for manifest in template(case) if manifest["kind"] not in CUSTOM_KINDS]
    assert len(known) >= 2
    file = tmp_path / "manifests.yaml"
    file.write_text(yaml.safe_dump_all(known))
    run(str(pip_environment("deploy") / "kubernetes-validate"), "--strict", str(file))


@pytest.mark.parametrize("case", CASES)
def test_a_pod_may_do_nothing_that_it_need_not(case: str) -> None:
    spec = find(template(case), "Deployment")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert spec["automountServiceAccountToken"] is False
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")} == {
        "/cache",
        "/tmp",
    }


@pytest.mark.parametrize("case", CASES)
def test_a_pod_is_given_longer_than_it_takes_to_end(case: str) -> None:
    spec = find(template(case), "Deployment")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    variables = {variable["name"]: variable.get("value") for variable in container["env"]}
    sleep_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert spec["terminationGracePeriodSeconds"] > sleep_s + float(variables["POINTSMAN_DRAIN_TIMEOUT_S"])
    # Else a Service's name would become a flag's variable.
    assert spec["enableServiceLinks"] is False


@pytest.mark.parametrize("case", CASES)
def test_services_and_monitors_find_the_pods(case: str) -> None:
    manifests = template(case)
    pod = find(manifests, "Deployment")["spec"]["template"]
    labels = pod["metadata"]["labels"].items()
    service = find(manifests, "Service")
    selectors = [service["spec"]["selector"]]
    for manifest in manifests:
        if manifest["kind"] == "PodDisruptionBudget":
            selectors.append(manifest["spec"]["selector"]["matchLabels"])
        if manifest["kind"] == "NetworkPolicy":
            selectors.append(manifest["spec"]["podSelector"]["matchLabels"])
        if manifest["kind"] == "ServiceMonitor":
            assert manifest["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
            assert {end["port"] for end in manifest["spec"]["endpoints"]} == {service["spec"]["ports"][0]["name"]}
    assert all(selector.items() <= labels for selector in selectors)
    (port,) = pod["spec"]["containers"][0]["ports"]
    assert service["spec"]["ports"][0]["targetPort"] == port["name"]


# ---------------------------------------------------------------------- parts
def test_alerts_and_dashboard_are_the_files_under_deploy() -> None:
    manifests = template("everything")
    alerts = yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yaml").read_text())
    assert find(manifests, "PrometheusRule")["spec"] == alerts
    dashboard = (ROOT / "deploy" / "grafana" / "dashboards" / "pointsman.json").read_text()
    assert find(manifests, "ConfigMap")["data"]["pointsman.json"].strip() == dashboard.strip()


def test_the_metrics_key_is_known_to_the_server_by_its_digest_only() -> None:
    manifests = template("everything")
    data = find(manifests, "Secret")["stringData"]
    digest = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"  # of "hello"
    assert data["metrics-key"] == "hello"
    assert data["api-keys"].splitlines() == [f"alice:user:sha256:{digest}", f"prometheus:metrics:sha256:{digest}"]
    (endpoint,) = find(manifests, "ServiceMonitor")["spec"]["endpoints"]
    secret = find(manifests, "Secret")["metadata"]["name"]
    assert endpoint["authorization"]["credentials"] == {"name": secret, "key": "metrics-key"}
    assert endpoint["scheme"] == "https"


def test_a_replica_count_is_the_autoscalers_where_there_is_one() -> None:
    assert "replicas" not in find(template("everything"), "Deployment")["spec"]
    assert "replicas" not in find(template("keda-cuda"), "Deployment")["spec"]
    assert find(template("minimal"), "Deployment")["spec"]["replicas"] == 1


def test_keda_asks_prometheus_about_this_release_only() -> None:
    (trigger,) = find(template("keda-cuda"), "ScaledObject")["spec"]["triggers"]
    query = 'sum(vllm:num_requests_waiting{namespace="serving",service="release-llm"})'
    assert trigger["metadata"]["query"] == query


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ([], "set auth.keys or auth.existingSecret, or accept it with auth.insecure=true"),
        (["auth.insecure=true", "replicaz=2"], "replicaz"),
        (["auth.insecure=true", "settings.PORT=9000"], "PORT"),
        (["auth.insecure=true", "settings.INSECURE=true"], "INSECURE"),
        (["auth.insecure=true", "autoscaling.kind=keda"], "prometheusAddress"),
        (["auth.insecure=true", "image.target=rocm"], "target"),
        (["auth.insecure=true", "shutdown.drainTimeoutSeconds=-1"], "drainTimeoutSeconds"),
    ],
)
def test_what_makes_no_sense_is_refused_with_a_reason(settings: list[str], reason: str) -> None:
    assert reason in refuse(*settings)


def test_the_notes_say_how_to_reach_it() -> None:
    command = (str(helm()), "install", "release", str(CHART), "--dry-run=client", "--set", "auth.insecure=true")
    said = run(*command).stdout
    assert "port-forward service/release-pointsman 8000:8000" in said
    assert "Nobody is asked for a key" in said
