"""Debian's Prometheus takes our rules, scrapes a server under load, and answers every query of ours and of vLLM's.

Whether each alert fires when it should is a matter of deploy/prometheus/alerts_test.yaml, which promtool runs.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.monitoring.alerts import ALERTS
from tests.e2e.server_process import ServerProcess
from tests.system.mixed_load import MixedLoad
from tests.system.prometheus_process import PrometheusProcess
from tests.system.tools import need_program, pip_environment
from tests.system.vllm_dashboards import build_queries

HERE = Path(__file__).parent
DEPLOY = HERE.parents[1] / "deploy"
RULES = DEPLOY / "prometheus" / "alerts.yaml"
DASHBOARD = DEPLOY / "grafana" / "dashboards" / "pointsman.json"
# So few places and blocks that requests wait and preempt each other.
SERVER = (
    *("--max-model-len", "512", "--block-size", "32", "--num-kv-blocks", "17"),
    *("--max-num-seqs", "4", "--num-threads", "1", "--served-model-name", "tiny"),
)
WINDOW = "1m"
# Nothing drafts yet: 0 by 0.
EMPTY_SHARES = {"Accepted drafts"}


@dataclass(frozen=True, slots=True)
class Watched:
    """A server that has been under load while Prometheus looked on."""

    server: ServerProcess
    prometheus: PrometheusProcess
    load: MixedLoad


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    program = need_program("prometheus", "prometheus")
    folder = tmp_path_factory.mktemp("prometheus")
    with ServerProcess(*SERVER, wait_ready=False) as server:
        provoke_503(server)
        server.wait_until(lambda: httpx.get(f"{server.url}/ready").status_code == 200)
        target = server.url.removeprefix("http://")
        with PrometheusProcess(program, folder, target, RULES) as prometheus, MixedLoad(server.url) as load:
            load.wait_until(lambda: load.num_done >= 6 and server.metric("vllm:num_preemptions_total") > 0)
            # Two samples after the last series was new: only then has each a rate.
            prometheus.wait_until_found("min(count_over_time(pointsman:unknown_fields_total[1m]) >= 3)", 30)
            prometheus.wait_until_found(f"sum(rate(vllm:request_success_total[{WINDOW}])) > 0", 30)
            yield Watched(server, prometheus, load)


def provoke_503(server: ServerProcess) -> None:
    """Ask while the model loads, so that there has been a request which failed by the server's fault."""

    def is_refused() -> bool:
        try:
            body = {"prompt": "too early", "max_tokens": 1}
            return httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).status_code == 503
        except httpx.TransportError:
            return False

    server.wait_until(is_refused)


def all_panels() -> list[dict[str, Any]]:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    panels = (panel for each in board["panels"] for panel in (each, *each.get("panels", [])))
    return [panel for panel in panels if panel["type"] != "row"]


def fill_in(query: str) -> str:
    """What Grafana puts for its variables."""
    return query.replace("$__rate_interval", WINDOW).replace("$model_name", ".*").replace("$instance", ".*")


def promtool(*arguments: str) -> str:
    program = need_program("promtool", "prometheus")
    done = subprocess.run([program, *arguments], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# ---------------------------------------------------------------------- the files
def test_promtool_takes_the_rules_and_the_configuration() -> None:
    assert f"{len(ALERTS)} rules found" in promtool("check", "rules", str(RULES))
    promtool("check", "config", "--syntax-only", str(DEPLOY / "prometheus" / "prometheus.yml"))


def test_every_alert_fires_when_it_should_and_not_else() -> None:
    assert "SUCCESS" in promtool("test", "rules", str(DEPLOY / "prometheus" / "alerts_test.yaml"))


def test_grafanas_own_types_read_the_dashboard_and_lose_nothing_of_it() -> None:
    python = pip_environment("grafana") / "python"
    command = [str(python), str(HERE / "grafana_check.py"), str(DASHBOARD)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    panels = all_panels()
    assert found["lost"] == []
    assert found["queries"] == sum(len(panel["targets"]) for panel in panels) > len(panels)


# ---------------------------------------------------------------------- a server under load
def test_every_panel_has_something_to_show(watched: Watched) -> None:
    for panel in all_panels():
        for target in panel["targets"]:
            values = watched.prometheus.ask(fill_in(target["expr"]))
            assert values, f"{panel['title']}: nothing for {target['expr']}"
            if panel["title"] not in EMPTY_SHARES:
                assert not all(math.isnan(value) for value in values), f"{panel['title']}: {target['expr']}"


def test_the_variables_of_the_dashboard_find_the_model_and_the_server(watched: Watched) -> None:
    url = f"{watched.prometheus.url}/api/v1/label/model_name/values"
    assert httpx.get(url).json()["data"] == ["tiny"]
    assert watched.prometheus.ask('vllm:num_requests_running{model_name="tiny"}')


@pytest.mark.parametrize("query", build_queries("tiny", WINDOW))
def test_vllms_own_dashboards_have_something_to_show(watched: Watched, query: str) -> None:
    values = watched.prometheus.ask(query)
    assert values
    assert not all(math.isnan(value) for value in values)


def test_every_series_that_an_alert_asks_for_is_there(watched: Watched) -> None:
    for alert in ALERTS:
        watched.prometheus.ask(alert.query.text)
        for selector in alert.query.selectors:
            assert watched.prometheus.ask(selector), f"{alert.name}: {selector}"


def test_prometheus_evaluates_every_alert(watched: Watched) -> None:
    rules = watched.prometheus.ask_rules()
    assert {rule["name"] for rule in rules} == {alert.full_name for alert in ALERTS}
    for rule in rules:
        assert (rule["health"], rule.get("lastError", "")) == ("ok", ""), rule["name"]


def test_the_load_was_answered(watched: Watched) -> None:
    assert watched.load.failures == []
    reasons = watched.prometheus.ask('vllm:request_success_total{finished_reason=~"abort|length"}')
    assert len(reasons) == 2 and min(reasons) > 0
    assert watched.prometheus.ask("vllm:num_preemptions_total")[0] > 0
    assert watched.prometheus.ask('http_requests_total{status="5xx"}')[0] > 0


def test_the_engine_is_seen_as_it_is(watched: Watched) -> None:
    ask = watched.prometheus.ask
    assert (ask("pointsman:ready"), ask("pointsman:max_num_seqs")) == ([1], [4])
    assert 0 <= ask("time() - pointsman:last_step_timestamp_seconds")[0] < 15
    assert max(ask("max_over_time(pointsman:num_live_requests[1m])")) >= 4
    assert max(ask("max_over_time(pointsman:seconds_since_progress[1m])")) < 2
