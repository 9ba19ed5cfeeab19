import pytest

from server.metric_row import MetricRow
from server.monitoring.promql import Query, QueryError, build_query
from server.monitoring.series import UnknownSeriesError

RUNNING, WAITING = "vllm:num_requests_running", "vllm:num_requests_waiting"


def build(text: str) -> Query:
    return build_query(text, lambda row: 'job="x"' if row.has_model_labels else "")


@pytest.mark.parametrize(
    ("text", "built"),
    [
        (RUNNING, RUNNING + '{job="x"}'),
        ("up == 0", "up{} == 0"),
        (f"{WAITING} > 0.5 and {RUNNING} == 5e1", f'{WAITING}{{job="x"}} > 0.5 and {RUNNING}{{job="x"}} == 5e1'),
        (
            'sum by (le) (rate(vllm:request_prompt_tokens_bucket{le="10.0"}[5m]))',
            'sum by (le) (rate(vllm:request_prompt_tokens_bucket{le="10.0", job="x"}[5m]))',
        ),
        (
            "histogram_quantile(0.95, sum by (job, le) (rate(vllm:request_prompt_tokens_bucket[5m])))",
            'histogram_quantile(0.95, sum by (job, le) (rate(vllm:request_prompt_tokens_bucket{job="x"}[5m])))',
        ),
        (
            "rate(vllm:generation_tokens_total[6h] offset 30m) > 1",
            'rate(vllm:generation_tokens_total{job="x"}[6h] offset 30m) > 1',
        ),
        (
            "rate(vllm:generation_tokens_total[$__rate_interval])",
            'rate(vllm:generation_tokens_total{job="x"}[$__rate_interval])',
        ),
        (
            f'({RUNNING} or vector(0)) unless count(ALERTS{{alertname=~"P.*{{2}}"}})',
            f'({RUNNING}{{job="x"}} or vector(0)) unless count(ALERTS{{alertname=~"P.*{{2}}"}})',
        ),
    ],
)
def test_each_series_is_narrowed_and_nothing_else_changes(text: str, built: str) -> None:
    assert build(text).text == built


def test_a_query_knows_its_series_and_rows() -> None:
    query = build(f"rate(vllm:request_prompt_tokens_sum[5m]) / {RUNNING} + {RUNNING}")
    assert query.selectors == ('vllm:request_prompt_tokens_sum{job="x"}', RUNNING + '{job="x"}')
    assert [row.name for row in query.rows] == ["vllm:request_prompt_tokens", RUNNING]
    rows: list[MetricRow] = list(query.rows)
    assert rows[0].kind == "histogram"


@pytest.mark.parametrize("text", ["vllm:num_requests_runing", "rat(up[5m])", "sum(vllm:request_prompt_tokens)"])
def test_an_unknown_name_cannot_be_written(text: str) -> None:
    with pytest.raises(UnknownSeriesError):
        build(text)


@pytest.mark.parametrize(
    "text",
    [
        "vllm:num_preemptions_total > 0",
        "avg_over_time(vllm:num_preemptions_total[5m])",
        "rate(vllm:num_preemptions_total)",
        f"rate({RUNNING}[5m])",
        f"sum({RUNNING}[5m])",
        f"avg_over_time({RUNNING})",
        f'{RUNNING}{{reason="capacity"}}',
        "sum by (reson) (rate(vllm:admission_rejections_total[5m]))",
    ],
)
def test_a_counter_without_a_rate_a_gauge_with_one_and_a_missing_label_are_refused(text: str) -> None:
    with pytest.raises(QueryError):
        build(text)
