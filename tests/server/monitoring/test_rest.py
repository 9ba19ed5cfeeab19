from server.metric_row import Healthy, by_label, counter, gauge, histogram
from server.metrics_table import TABLE
from server.monitoring.panels import OVERVIEW, SECTIONS
from server.monitoring.rest import build_sections


def test_every_metric_of_the_table_is_on_some_panel() -> None:
    sections = build_sections()
    assert [section for section in sections if section.title != "More"] == list(SECTIONS)
    folded = [section.is_folded for section in sections]
    assert folded == sorted(folded), "what is folded comes last"
    queries = [query for section in sections for panel in section.panels for query in panel.built.values()]
    shown = {row.name for query in queries for row in query.rows}
    left_out = {row.name for row in TABLE if not row.alias_of} - shown
    assert left_out == {
        *("vllm:num_requests_swapped", "vllm:cpu_cache_usage_perc", "vllm:engine_sleep_state"),
        *("vllm:avg_prompt_throughput_toks_per_s", "vllm:avg_generation_throughput_toks_per_s"),
    }
    assert not shown & {row.name for row in TABLE if row.alias_of}, "second names are for others"


def test_a_row_without_a_panel_gets_one_of_its_kind() -> None:
    # Only names of the table can be asked for.
    rows = (
        gauge("pointsman:num_live_requests", "requests", "Some.", healthy=Healthy(high=3)),
        by_label("reason", ("x",), counter("vllm:admission_rejections_total", "requests", "Some.")),
        histogram("vllm:request_params_n", "choices", (1.0,), "Some."),
        gauge("vllm:num_requests_running", "requests", "Some."),
    )
    (*_, rest) = build_sections([OVERVIEW], rows)
    assert (rest.title, rest.is_folded) == ("More", False)
    assert [(panel.title, dict(panel.queries), panel.healthy) for panel in rest.panels] == [
        ("pointsman:num_live_requests", {"{{instance}}": "pointsman:num_live_requests"}, Healthy(high=3)),
        (
            "vllm:admission_rejections_total",
            {"{{reason}} {{instance}}": "rate(vllm:admission_rejections_total[R])"},
            None,
        ),
        (
            "vllm:request_params_n",
            {
                "p95 {{instance}}": "histogram_quantile(0.95, sum by (instance, le) "
                "(rate(vllm:request_params_n_bucket[R])))"
            },
            None,
        ),
    ]
    for panel in rest.panels:
        assert panel.to_grafana(1, 0, 0)["targets"]


def test_nothing_left_out_is_no_section() -> None:
    assert build_sections([OVERVIEW], ()) == [OVERVIEW]
