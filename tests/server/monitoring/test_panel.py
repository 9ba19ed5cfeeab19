import math

import pytest

from server.metric_row import Healthy
from server.monitoring.panel import Panel, build_steps
from server.monitoring.series import UnknownSeriesError

PANEL = Panel(
    title="Waiting",
    queries={"{{instance}}": "vllm:num_requests_waiting", "files": "process_open_fds"},
    unit="short",
    healthy=Healthy(high=0),
    note="Mind it.",
    maximum=9,
)


@pytest.mark.parametrize(
    ("healthy", "steps"),
    [
        (Healthy(low=0.4, high=0.8, alarm=0.95), [("blue", None), ("green", 0.4), ("yellow", 0.8), ("red", 0.95)]),
        (Healthy(low=0.6, is_low_bad=True), [("yellow", None), ("green", 0.6)]),
        (Healthy(high=0), [("green", None), ("yellow", 1e-9)]),
        (Healthy(alarm=1), [("green", None), ("red", 1)]),
        (Healthy(), [("green", None)]),
    ],
)
def test_colours_are_the_healthy_range(healthy: Healthy, steps: list[tuple[str, float | None]]) -> None:
    assert [(step["color"], step["value"]) for step in build_steps(healthy)] == steps
    values = [step["value"] for step in build_steps(healthy)]
    assert values[0] is None and values[1:] == sorted(values[1:]) and math.inf not in values


def test_a_panel_is_narrowed_to_what_is_chosen_and_explained_from_the_table() -> None:
    panel = PANEL.to_grafana(7, 8, 16)
    assert [(target["refId"], target["expr"], target["legendFormat"]) for target in panel["targets"]] == [
        ("A", 'vllm:num_requests_waiting{model_name=~"$model_name", instance=~"$instance"}', "{{instance}}"),
        ("B", 'process_open_fds{instance=~"$instance"}', "files"),
    ]
    assert panel["description"].startswith("Mind it.\n\n- `vllm:num_requests_waiting`: Requests waiting for admission")
    assert "`process_open_fds`: Open files and sockets." in panel["description"]
    assert panel["gridPos"] == {"h": 8, "w": 8, "x": 8, "y": 16}
    defaults = panel["fieldConfig"]["defaults"]
    assert (defaults["unit"], defaults["max"]) == ("short", 9)
    assert defaults["custom"]["thresholdsStyle"] == {"mode": "line"}


def test_a_number_has_no_lines_and_its_colour_is_its_thresholds() -> None:
    panel = Panel(title="Up", queries={"": "sum(up)"}, unit="short", kind="stat").to_grafana(1, 0, 0)
    defaults = panel["fieldConfig"]["defaults"]
    assert "custom" not in defaults and "max" not in defaults
    assert defaults["color"] == {"mode": "thresholds"}
    assert [mapping["options"]["match"] for mapping in defaults["mappings"]] == ["nan"]
    assert panel["type"] == "stat"


def test_a_name_shows_its_legend() -> None:
    panel = Panel(title="KV", queries={"{{block_size}}": "vllm:cache_config_info"}, unit="short", kind="name")
    shown = panel.to_grafana(1, 0, 0)
    assert (shown["type"], shown["options"]["textMode"]) == ("stat", "name")


def test_windows_of_rates_are_grafanas() -> None:
    panel = Panel(title="Rate", queries={"": "rate(vllm:generation_tokens_total[R])"}, unit="short")
    assert "[$__rate_interval]" in panel.to_grafana(1, 0, 0)["targets"][0]["expr"]


def test_a_panel_cannot_name_what_nobody_counts() -> None:
    with pytest.raises(UnknownSeriesError):
        Panel(title="Gone", queries={"": "vllm:gone"}, unit="short").to_grafana(1, 0, 0)
