import logging

import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine_core import FinishReason, SchedulerStats
from server.metrics import ServerMetrics, StepRecord

STATS = SchedulerStats(
    num_running=3,
    num_waiting=2,
    num_blocks=10,
    num_free_blocks=4,
    num_parked=1,
    num_scheduled_tokens=107,
    num_prompt_tokens=100,
    num_draft_tokens=5,
    num_accepted_tokens=(2, 1),
    num_generation_tokens=3,
    num_preempted=1,
    num_prefix_queries=90,
    num_prefix_hits=64,
    num_resumed_queries=40,
    num_resumed_hits=32,
    num_stalls=2,
    schedule_time_s=0.25,
    update_time_s=0.125,
    step_time_s=0.02,
)


def samples(metrics: ServerMetrics) -> dict[tuple[str, str], float]:
    """Every sample of /metrics by (name, its own labels as text)."""
    found = {}
    for family in text_string_to_metric_families(metrics.render()[0].decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert labels.pop("model_name") == "tiny"
            assert labels.pop("engine") == "0"
            found[sample.name, ",".join(f"{k}={v}" for k, v in sorted(labels.items()))] = sample.value
    return found


def test_every_series_without_labels_of_its_own_exists_at_zero() -> None:
    found = samples(ServerMetrics("tiny"))
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:num_preemptions_total",
        "vllm:prefix_cache_queries_total",
        "vllm:prefix_cache_hits_total",
        "vllm:spec_decode_num_draft_tokens_total",
        "vllm:spec_decode_num_accepted_tokens_total",
        "pointsman:num_requests_parked",
        "pointsman:prompt_tokens_scheduled_total",
        "pointsman:resumed_prefix_cache_queries_total",
        "pointsman:resumed_prefix_cache_hits_total",
        "pointsman:num_stalls_total",
        "pointsman:schedule_time_seconds_total",
        "pointsman:update_time_seconds_total",
        "vllm:time_to_first_token_seconds_count",
        "vllm:inter_token_latency_seconds_count",
        "vllm:e2e_request_latency_seconds_count",
        "vllm:iteration_tokens_total_count",
    ):
        assert found[name, ""] == 0
    for reason in ("stop", "length", "abort", "error"):
        assert found["vllm:request_success_total", f"finished_reason={reason}"] == 0


def test_gauges_follow_the_scheduler_and_return_to_zero() -> None:
    metrics = ServerMetrics("tiny")
    metrics.record_step(StepRecord(), STATS)
    found = samples(metrics)
    assert found["vllm:num_requests_running", ""] == 3
    assert found["vllm:num_requests_waiting", ""] == 2
    assert found["vllm:kv_cache_usage_perc", ""] == pytest.approx(0.6)
    assert found["pointsman:num_requests_parked", ""] == 1
    metrics.record_step(StepRecord(), SchedulerStats(num_blocks=10, num_free_blocks=10))
    found = samples(metrics)
    assert found["vllm:num_requests_running", ""] == 0
    assert found["vllm:num_requests_waiting", ""] == 0
    assert found["vllm:kv_cache_usage_perc", ""] == 0
    assert found["pointsman:num_requests_parked", ""] == 0


def test_the_schedulers_counts_add_up_and_only_steps_count_as_iterations() -> None:
    metrics = ServerMetrics("tiny")
    metrics.record_step(StepRecord(), STATS)
    metrics.record_step(StepRecord(), STATS)
    metrics.record_step(StepRecord(), SchedulerStats())
    metrics.record_step(StepRecord(), None)
    found = samples(metrics)
    assert found["vllm:num_preemptions_total", ""] == 2
    assert found["vllm:prefix_cache_queries_total", ""] == 180
    assert found["vllm:prefix_cache_hits_total", ""] == 128
    assert found["vllm:iteration_tokens_total_count", ""] == 2
    assert found["vllm:iteration_tokens_total_sum", ""] == 206
    assert found["vllm:spec_decode_num_draft_tokens_total", ""] == 10
    assert found["vllm:spec_decode_num_accepted_tokens_total", ""] == 6
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", "position=0"] == 4
    assert found["vllm:spec_decode_num_accepted_tokens_per_pos_total", "position=1"] == 2
    assert found["pointsman:prompt_tokens_scheduled_total", ""] == 200
    assert found["pointsman:resumed_prefix_cache_queries_total", ""] == 80
    assert found["pointsman:resumed_prefix_cache_hits_total", ""] == 64
    assert found["pointsman:num_stalls_total", ""] == 4
    assert found["pointsman:schedule_time_seconds_total", ""] == 0.5
    assert found["pointsman:update_time_seconds_total", ""] == 0.25


def test_a_prompts_end_counts_its_tokens_and_the_one_it_samples_as_vllm_does() -> None:
    metrics = ServerMetrics("tiny")
    prompt_end = {"num_scheduled_tokens": 8, "num_prompt_tokens": 8, "num_generation_tokens": 1}
    drafts = {"num_scheduled_tokens": 4, "num_draft_tokens": 3, "num_accepted_tokens": (1,), "num_generation_tokens": 2}
    for stats in (SchedulerStats(step_time_s=0.1, **prompt_end), SchedulerStats(step_time_s=0.1, **drafts)):
        metrics.record_step(StepRecord(), stats)
    found = samples(metrics)
    assert found["vllm:iteration_tokens_total_count", ""] == 2
    assert found["vllm:iteration_tokens_total_sum", ""] == 9 + 2


def test_tokens_that_were_told_while_their_step_ran_count_in_its_iteration() -> None:
    metrics = ServerMetrics("tiny")
    metrics.record_step(StepRecord(), SchedulerStats(num_prompt_tokens=100))  # an abort's news, in mid-step
    assert samples(metrics)["vllm:iteration_tokens_total_count", ""] == 0
    metrics.record_step(StepRecord(), SchedulerStats(num_generation_tokens=1, step_time_s=0.1))
    metrics.record_step(StepRecord(), SchedulerStats(num_generation_tokens=1, step_time_s=0.1))
    found = samples(metrics)
    assert found["vllm:iteration_tokens_total_count", ""] == 2
    assert found["vllm:iteration_tokens_total_sum", ""] == 102
    assert found["vllm:iteration_tokens_total_bucket", "le=1.0"] == 1


def test_requests_are_counted_and_timed() -> None:
    metrics = ServerMetrics("tiny")
    metrics.record_step(
        StepRecord(
            num_prompt_tokens=7,
            num_generation_tokens=4,
            first_token_s=[0.05],
            token_gap_s=[0.02, 0.03],
            ended=[(FinishReason.STOP, 1.5), (FinishReason.ABORT, 0.5)],
        ),
        None,
    )
    found = samples(metrics)
    assert found["vllm:prompt_tokens_total", ""] == 7
    assert found["vllm:generation_tokens_total", ""] == 4
    assert found["vllm:time_to_first_token_seconds_sum", ""] == 0.05
    assert found["vllm:time_to_first_token_seconds_bucket", "le=0.06"] == 1
    assert found["vllm:time_to_first_token_seconds_bucket", "le=0.04"] == 0
    assert found["vllm:inter_token_latency_seconds_count", ""] == 2
    assert found["vllm:e2e_request_latency_seconds_sum", ""] == 2.0
    assert found["vllm:request_success_total", "finished_reason=stop"] == 1
    assert found["vllm:request_success_total", "finished_reason=abort"] == 1


def test_unknown_field_names_cannot_flood_the_registry() -> None:
    metrics = ServerMetrics("tiny")
    for i in range(500):
        metrics.count_unknown_field(f"field_{i}")
    metrics.count_unknown_field("field_0")
    metrics.count_unknown_field("x" * 10_000)
    found = {key: value for key, value in samples(metrics).items() if key[0] == "pointsman:unknown_fields_total"}
    assert len(found) == 65
    assert found["pointsman:unknown_fields_total", "field=field_0"] == 2
    assert sum(found.values()) == 502


def test_a_failing_metric_is_logged_once_and_costs_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    metrics = ServerMetrics("tiny")
    broken = StepRecord(num_generation_tokens=-1)  # a counter refuses to go down
    with caplog.at_level(logging.ERROR):
        metrics.record_step(broken, None)
        metrics.record_step(broken, None)
    assert len(caplog.records) == 1
    metrics.record_step(StepRecord(num_generation_tokens=2), None)
    assert samples(metrics)["vllm:generation_tokens_total", ""] == 2


def test_the_content_type_is_prometheus_text() -> None:
    assert ServerMetrics("tiny").render()[1].startswith("text/plain; version=")
