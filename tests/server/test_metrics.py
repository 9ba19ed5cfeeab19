import functools
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine_core import EnginePhase, EngineState, FinishReason, SchedulerStats
from server.http.http_metrics import OTHER
from server.metrics import ServerMetrics
from server.records import StepRecord
from tests.server.metric_samples import STATS, create_record, read_samples

ABORT = FinishReason.ABORT


class FakeClock:
    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now


def get_histogram(metrics: ServerMetrics, name: str) -> tuple[float, float]:
    """A histogram's count and sum."""
    found = read_samples(metrics)
    return found[f"{name}_count", ""], found[f"{name}_sum", ""]


# ---------------------------------------------------------------------- the scheduler's figures
def test_gauges_follow_the_scheduler_and_return_to_zero() -> None:
    metrics = ServerMetrics("tiny")
    gauges = {
        ("vllm:num_requests_running", ""): 3,
        ("vllm:num_requests_waiting", ""): 4,
        ("vllm:num_requests_waiting_by_reason", "reason=deferred"): 3,
        ("vllm:num_requests_waiting_by_reason", "reason=capacity"): 1,
        ("vllm:kv_cache_usage_perc", ""): 0.6,
        ("pointsman:num_requests_parked", ""): 1,
        ("vllm_prompt_tokens_per_step", ""): 60,
        ("vllm_generation_tokens_per_step", ""): 3,
    }
    metrics.record_step(StepRecord(), STATS)
    found = read_samples(metrics)
    assert {key: found[key] for key in gauges} == pytest.approx(gauges)
    metrics.record_step(StepRecord(), SchedulerStats(num_blocks=10, num_free_blocks=10))
    found = read_samples(metrics)
    assert {key: found[key] for key in gauges} == dict.fromkeys(gauges, 0)


def test_no_gauge_goes_below_zero_whatever_it_is_told() -> None:
    metrics = ServerMetrics("tiny")
    metrics.record_step(StepRecord(), SchedulerStats(num_running=-1, num_parked=1, num_blocks=4, num_free_blocks=5))
    assert min(read_samples(metrics).values()) == 0


def test_the_schedulers_counts_add_up_and_only_steps_count_as_iterations() -> None:
    metrics = ServerMetrics("tiny")
    metrics.record_step(StepRecord(), STATS)
    metrics.record_step(StepRecord(), STATS)
    metrics.record_step(StepRecord(), SchedulerStats())
    metrics.record_step(StepRecord(), None)
    found = read_samples(metrics)
    expected = {
        ("vllm:num_preemptions_total", ""): 2,
        ("vllm:prefix_cache_queries_total", ""): 180,
        ("vllm:prefix_cache_hits_total", ""): 128,
        ("vllm:iteration_tokens_total_count", ""): 2,
        ("vllm:iteration_tokens_total_sum", ""): 126,
        ("vllm:spec_decode_num_drafts_total", ""): 6,
        ("vllm:spec_decode_num_draft_tokens_total", ""): 10,
        ("vllm:spec_decode_num_accepted_tokens_total", ""): 6,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position=0"): 4,
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position=1"): 2,
        ("pointsman:prompt_tokens_scheduled_total", ""): 200,
        ("pointsman:resumed_prefix_cache_queries_total", ""): 80,
        ("pointsman:resumed_prefix_cache_hits_total", ""): 64,
        ("pointsman:num_stalls_total", ""): 4,
        ("pointsman:schedule_time_seconds_total", ""): 0.5,
        ("pointsman:update_time_seconds_total", ""): 0.25,
    }
    assert {key: found[key] for key in expected} == expected
    assert found["vllm_prefix_cache_hit_ratio", ""] == pytest.approx(128 / 180)


def test_drafts_accepted_after_the_step_that_made_them_are_counted() -> None:
    metrics = ServerMetrics("tiny")
    metrics.record_step(StepRecord(), SchedulerStats(num_steps=1, num_accepted_tokens=(1,)))
    assert read_samples(metrics)["vllm:spec_decode_num_accepted_tokens_total", ""] == 1


def test_the_last_steps_figures_stay_while_requests_run_and_go_when_none_does() -> None:
    metrics = ServerMetrics("tiny")
    metrics.record_step(StepRecord(), STATS)
    metrics.record_step(StepRecord(), SchedulerStats(num_running=2))  # an abort's news, between steps
    assert read_samples(metrics)["vllm_prompt_tokens_per_step", ""] == 60
    metrics.record_step(StepRecord(), SchedulerStats(num_steps=1, num_step_generation_tokens=1))
    found = read_samples(metrics)
    assert (found["vllm_prompt_tokens_per_step", ""], found["vllm_generation_tokens_per_step", ""]) == (0, 0)
    assert found["vllm:iteration_tokens_total_bucket", "le=1.0"] == 1


# ---------------------------------------------------------------------- requests
def test_tokens_are_counted_with_the_first_one_and_by_where_their_kv_came_from() -> None:
    metrics = ServerMetrics("tiny")
    started = [create_record(), create_record(num_prompt_tokens=5, num_cached_tokens=0, first_token_time=100.05)]
    metrics.record_step(StepRecord(num_generation_tokens=4, started=started, token_gap_s=[0.02, 0.03]), None)
    found = read_samples(metrics)
    expected = {
        ("vllm:prompt_tokens_total", ""): 17,
        ("vllm:prompt_tokens_cached_total", ""): 8,
        ("vllm:prompt_tokens_by_source_total", "source=local_compute"): 9,
        ("vllm:prompt_tokens_by_source_total", "source=local_cache_hit"): 8,
        ("vllm:prompt_tokens_by_source_total", "source=external_kv_transfer"): 0,
        ("vllm:generation_tokens_total", ""): 4,
        ("vllm:time_to_first_token_seconds_count", ""): 2,
        ("vllm:time_to_first_token_seconds_bucket", "le=0.06"): 1,
        ("vllm:time_to_first_token_seconds_bucket", "le=0.04"): 0,
        ("vllm:inter_token_latency_seconds_count", ""): 2,
        ("vllm:inter_token_latency_seconds_bucket", "le=0.025"): 1,
    }
    assert {key: found[key] for key in expected} == expected
    assert found["vllm:time_to_first_token_seconds_sum", ""] == pytest.approx(1.55)
    assert found["vllm:inter_token_latency_seconds_sum", ""] == pytest.approx(0.05)


def test_a_request_that_ends_is_counted_and_its_time_split_into_phases() -> None:
    metrics = ServerMetrics("tiny")
    metrics.record_step(StepRecord(ended=[create_record()]), None)
    expected = {
        "vllm:e2e_request_latency_seconds": 2.5,
        "vllm:request_queue_time_seconds": 0.5,
        "vllm:request_prefill_time_seconds": 1.0,
        "vllm:request_decode_time_seconds": 0.75,
        "vllm:request_inference_time_seconds": 1.75,
        "vllm:request_time_per_output_token_seconds": 0.25,
        "vllm:request_prompt_tokens": 12,
        "vllm:request_generation_tokens": 4,
        "vllm:request_max_num_generation_tokens": 4,
        "vllm:request_prefill_kv_computed_tokens": 4,
        "vllm:request_params_max_tokens": 40,
        "vllm:request_params_n": 1,
    }
    assert {name: get_histogram(metrics, name) for name in expected} == {
        name: (1, sum_) for name, sum_ in expected.items()
    }
    assert read_samples(metrics)["vllm:request_success_total", "finished_reason=stop"] == 1


def test_a_request_aborted_while_it_waits_has_no_phases_but_an_end() -> None:
    metrics = ServerMetrics("tiny")
    waited = create_record(
        num_cached_tokens=0,
        num_output_tokens=0,
        first_scheduled_time=None,
        first_token_time=None,
        last_token_time=None,
        finish_reason=ABORT,
    )
    metrics.record_step(StepRecord(ended=[waited]), None)
    for name in ("queue_time_seconds", "prefill_time_seconds", "decode_time_seconds", "prefill_kv_computed_tokens"):
        assert get_histogram(metrics, f"vllm:request_{name}") == (0, 0)
    assert get_histogram(metrics, "vllm:e2e_request_latency_seconds") == (1, 2.5)
    assert get_histogram(metrics, "vllm:request_generation_tokens") == (1, 0)
    assert read_samples(metrics)["vllm:request_success_total", "finished_reason=abort"] == 1


def test_a_single_token_has_no_time_per_token() -> None:
    metrics = ServerMetrics("tiny")
    metrics.record_step(StepRecord(ended=[create_record(num_output_tokens=1, last_token_time=101.5)]), None)
    assert get_histogram(metrics, "vllm:request_time_per_output_token_seconds") == (0, 0)
    assert get_histogram(metrics, "vllm:request_decode_time_seconds") == (1, 0)
    assert get_histogram(metrics, "vllm:request_prefill_time_seconds") == (1, 1.0), "nothing failed on the way"


def test_n_choices_are_n_requests_but_were_asked_for_once() -> None:
    metrics = ServerMetrics("tiny")
    metrics.record_step(StepRecord(ended=[create_record(n=3), create_record(), create_record(n=3)]), None)
    assert get_histogram(metrics, "vllm:request_params_n") == (1, 1)
    metrics.record_step(StepRecord(ended=[create_record(n=3)]), None)
    assert get_histogram(metrics, "vllm:request_params_n") == (2, 4)
    assert get_histogram(metrics, "vllm:request_generation_tokens") == (4, 16)


# ---------------------------------------------------------------------- throughput
def test_throughput_is_of_the_last_ten_seconds_and_any_number_of_scrapers_see_the_same() -> None:
    clock = FakeClock()
    metrics = ServerMetrics("tiny", clock=clock)
    for _ in range(20):
        metrics.record_step(StepRecord(num_generation_tokens=30, started=[create_record()]), None)
        clock.now += 0.5
    names = ("vllm:avg_prompt_throughput_toks_per_s", "vllm:avg_generation_throughput_toks_per_s")
    pages = [[read_samples(metrics)[name, ""] for name in names] for _ in range(3)]
    assert pages == [pytest.approx([24, 60])] * 3
    clock.now += 4
    assert read_samples(metrics)[names[1], ""] == pytest.approx(5 * 60 / 9)
    clock.now += 10
    assert [read_samples(metrics)[name, ""] for name in names] == [0, 0]


# ---------------------------------------------------------------------- what is asked for at each scrape
def test_what_is_watched_is_asked_for_at_each_scrape() -> None:
    metrics = ServerMetrics("tiny")
    name = "pointsman:num_live_requests"
    assert read_samples(metrics)[name, ""] == 0
    lives = iter([3, 4])
    metrics.watch(lambda: {name: next(lives)})
    metrics.watch(lambda: {"pointsman:ready": True})
    pages = [read_samples(metrics) for _ in range(2)]
    assert [(found[name, ""], found["pointsman:ready", ""]) for found in pages] == [(3, 1), (4, 1)]


def test_who_is_watched_later_has_the_last_word() -> None:
    metrics = ServerMetrics("tiny")
    for cap in (64, 16):
        metrics.watch(functools.partial(dict, {"pointsman:max_num_seqs": cap}))
    assert read_samples(metrics)["pointsman:max_num_seqs", ""] == 16


def test_what_cannot_be_asked_costs_no_other_metric() -> None:
    metrics = ServerMetrics("tiny")
    metrics.record_step(StepRecord(), STATS)
    metrics.watch(lambda: {"pointsman:ready": 1 / 0})
    assert read_samples(metrics)["vllm:num_requests_running", ""] == 3


def test_the_last_step_has_its_time_and_news_without_a_step_does_not_change_it() -> None:
    clock = FakeClock(1_700_000_000.5)
    metrics = ServerMetrics("tiny", unix_time=clock)
    name = ("pointsman:last_step_timestamp_seconds", "")
    assert read_samples(metrics)[name] == 0
    metrics.record_step(StepRecord(), STATS)
    clock.now += 9
    metrics.record_step(StepRecord(), SchedulerStats(num_running=1))
    assert read_samples(metrics)[name] == 1_700_000_000.5


def test_rejections_are_counted_by_reason() -> None:
    metrics = ServerMetrics("tiny")
    fresh = {key: value for key, value in read_samples(metrics).items() if key[0] == "vllm:admission_rejections_total"}
    assert fresh and set(fresh.values()) == {0}, "rate() misses the first event of a series that was not there before"
    for _ in range(2):
        metrics.count_rejection("queue_full")
    assert read_samples(metrics)["vllm:admission_rejections_total", "reason=queue_full"] == 2


# ---------------------------------------------------------------------- HTTP, fields, the cache
def test_http_requests_are_counted_and_timed_without_the_models_labels() -> None:
    metrics = ServerMetrics("tiny")
    for status in ("2xx", "2xx", "4xx"):
        metrics.record_http(method="POST", status=status, handler="/v1/completions", duration_s=0.3)
    found = read_samples(metrics)
    assert found["http_requests_total", "handler=/v1/completions,method=POST,status=2xx"] == 2
    assert found["http_requests_total", "handler=/v1/completions,method=POST,status=4xx"] == 1
    assert found["http_request_duration_seconds_bucket", "handler=/v1/completions,le=0.5,method=POST"] == 3
    assert found["http_request_duration_seconds_bucket", "handler=/v1/completions,le=0.1,method=POST"] == 0
    line = next(line for line in metrics.render()[0].splitlines() if line.startswith(b"http_requests_total{"))
    assert b"model_name" not in line


def test_what_was_refused_unread_is_counted_but_not_timed() -> None:
    metrics = ServerMetrics("tiny")
    for status in (400, 431):
        metrics.count_refusal(status)
    found = {key: value for key, value in read_samples(metrics).items() if key[0].startswith("http_")}
    assert found == {("http_requests_total", f"handler={OTHER},method={OTHER},status=4xx"): 2}


def test_near_misses_of_the_watchdog_are_counted_from_zero() -> None:
    metrics = ServerMetrics("tiny")
    assert read_samples(metrics)["pointsman:watchdog_near_misses_total", ""] == 0
    metrics.count_watchdog_near_miss()
    assert read_samples(metrics)["pointsman:watchdog_near_misses_total", ""] == 1


def test_the_caches_size_is_shown_once_it_is_known() -> None:
    metrics = ServerMetrics("tiny")
    assert not [key for key in read_samples(metrics) if key[0] == "vllm:cache_config_info"]
    state = EngineState(EnginePhase.READY, num_blocks=100, block_size=16, max_model_len=1024, kv_bytes=4096)
    metrics.set_cache_config(state, cache_dtype="auto", enable_prefix_caching=True)
    (labels,) = [key[1] for key in read_samples(metrics) if key[0] == "vllm:cache_config_info"]
    assert labels == (
        "block_size=16,cache_dtype=auto,enable_prefix_caching=True,kv_cache_memory_bytes=4096,"
        "num_cpu_blocks=0,num_gpu_blocks=100"
    )


def test_unknown_field_names_cannot_flood_the_registry() -> None:
    metrics = ServerMetrics("tiny")
    for i in range(500):
        metrics.count_unknown_field(f"field_{i}")
    metrics.count_unknown_field("field_0")
    metrics.count_unknown_field("x" * 10_000)
    found = {key: value for key, value in read_samples(metrics).items() if key[0] == "pointsman:unknown_fields_total"}
    assert len(found) == 65
    assert found["pointsman:unknown_fields_total", "field=field_0"] == 2
    assert sum(found.values()) == 502


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("messages[0].tool-calls_2", "messages[0].tool-calls_2"),
        ('"} 1\nvllm:forged 1\n', "???1?vllm?forged?1?"),
        ("a\rvllm:forged 1\r", "a?vllm?forged?1?"),
        ("(other)", "?other?"),
        ("\\", "?"),
        ("\ud800", "?"),
        ("模型", "??"),
        ("", ""),
    ],
)
def test_no_field_name_breaks_the_page(name: str, shown: str) -> None:
    metrics = ServerMetrics("tiny")
    metrics.count_unknown_field(name)
    assert read_samples(metrics)["pointsman:unknown_fields_total", f"field={shown}"] == 1
    lines = metrics.render()[0].decode().splitlines()
    assert not [line for line in lines if line.startswith("vllm:forged")]


def test_field_names_that_look_alike_on_the_page_are_one_series() -> None:
    metrics = ServerMetrics("tiny")
    for name in ("a\r", "a\n", "a?"):
        metrics.count_unknown_field(name)
    assert read_samples(metrics)["pointsman:unknown_fields_total", "field=a?"] == 3


# ---------------------------------------------------------------------- the page and its failures
def test_a_failing_metric_is_logged_once_and_costs_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    metrics = ServerMetrics("tiny")
    unfinished = create_record(finish_reason=None)
    broken = StepRecord(num_generation_tokens=-1, ended=[unfinished, create_record()])  # a counter refuses to go down
    with caplog.at_level(logging.ERROR):
        metrics.record_step(broken, STATS)
        metrics.record_step(broken, STATS)
    assert len(caplog.records) == 1
    metrics.record_step(StepRecord(num_generation_tokens=2), None)
    found = read_samples(metrics)
    assert found["vllm:generation_tokens_total", ""] == 2
    assert found["vllm:num_requests_running", ""] == 3
    assert found["vllm:request_success_total", "finished_reason=stop"] == 2


def test_the_content_type_is_prometheus_text() -> None:
    page, content_type = ServerMetrics("tiny").render()
    assert content_type == "text/plain; version=0.0.4; charset=utf-8"
    assert page.endswith(b"\n")


def test_the_process_is_on_the_page_too() -> None:
    page = ServerMetrics("tiny").render()[0]
    for name in (b"process_resident_memory_bytes", b"process_start_time_seconds", b"process_open_fds", b"python_info"):
        assert b"\n" + name in page


def test_g10_a_multiprocess_directory_in_the_environment_changes_nothing(tmp_path: Path) -> None:
    code = (
        "from server.metrics import ServerMetrics; from server.records import StepRecord; m = ServerMetrics('tiny');"
        "m.record_step(StepRecord(num_generation_tokens=3), None);"
        'assert b\'vllm:generation_tokens_total{engine="0",model_name="tiny"} 3.0\' in m.render()[0]'
    )
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(tmp_path)}
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", code], env=environment, cwd=root, check=True, timeout=60)
    assert list(tmp_path.iterdir()) == []


def test_g10_two_servers_in_a_process_count_apart() -> None:
    one, other = ServerMetrics("tiny"), ServerMetrics("tiny")
    one.record_step(StepRecord(num_generation_tokens=3), STATS)
    assert read_samples(other)["vllm:generation_tokens_total", ""] == 0
    assert read_samples(other)["vllm:num_requests_running", ""] == 0
