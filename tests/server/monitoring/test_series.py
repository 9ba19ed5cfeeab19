import pytest

from server.metrics import ServerMetrics
from server.metrics_table import TABLE
from server.monitoring.series import SCRAPED, UnknownSeriesError, find_row, find_series, own_labels


def test_every_row_of_the_table_is_found_under_the_names_of_its_samples() -> None:
    for row in TABLE:
        suffixes = ("_bucket", "_sum", "_count") if row.kind == "histogram" else ("",)
        for suffix in suffixes:
            assert find_series(row.name + suffix).row is row
        assert find_row(row.name) is row


def test_what_a_histogram_shows_are_counters() -> None:
    assert find_series("vllm:iteration_tokens_total_count").kind == "counter"
    assert find_series("vllm:num_requests_running").kind == "gauge"
    assert find_series("vllm:num_preemptions_total").kind == "counter"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("vllm:num_request_waiting", "is it vllm:num_requests_waiting"),
        ("nothing_like_it_at_all_0123456789", "no metric is called"),
        ("vllm:time_to_first_token_seconds", "_bucket, _sum or _count"),
        ("vllm:num_requests_waiting_sum", "is it"),
    ],
)
def test_a_name_that_no_server_shows_is_refused(name: str, message: str) -> None:
    with pytest.raises(UnknownSeriesError, match=message):
        find_series(name)


def test_what_is_said_of_the_process_is_on_the_page() -> None:
    page = ServerMetrics("tiny").render()[0].decode()
    rows = [row for row in SCRAPED if row.name.startswith("process_")]
    assert rows
    for row in rows:
        assert f"# TYPE {row.name} {row.kind}\n" in page


def test_labels_are_the_rows_own_the_models_and_prometheus() -> None:
    assert own_labels(find_row("vllm:request_success_total")) == {
        *("finished_reason", "model_name", "engine", "job", "instance")
    }
    assert own_labels(find_row("http_request_duration_seconds")) == {"method", "handler", "le", "job", "instance"}
