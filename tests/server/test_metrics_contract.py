"""What dashboards, routers and autoscalers ask for is on the page of a server that has served nobody (G7, G8)."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.metric_row import MetricRow
from server.metrics import ServerMetrics
from server.metrics_docs import metrics_table
from server.metrics_table import TABLE
from tests.server.metric_samples import read_families, read_samples

README = Path(__file__).parents[2] / "README.md"
MODEL_LABELS = {"model_name", "engine"}

# Source: api-and-metrics.md 2.6: every series that vLLM's official dashboards query.
DASHBOARDS = {
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:prompt_tokens_total": "counter",
    "vllm:generation_tokens_total": "counter",
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:request_success_total": "counter",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
    "vllm:request_max_num_generation_tokens": "histogram",
    "vllm:iteration_tokens_total": "histogram",
    "vllm:gpu_prefix_cache_hits_total": "counter",
    "vllm:gpu_prefix_cache_queries_total": "counter",
}
# Source: the same, 2.1 and 2.7: gateways, autoscalers, names that are gone from vLLM, and what monitors read.
CONSUMERS = {
    "vllm:time_per_output_token_seconds": "histogram",
    "vllm:gpu_cache_usage_perc": "gauge",
    "vllm:num_requests_swapped": "gauge",
    "vllm:cpu_cache_usage_perc": "gauge",
    "vllm:avg_prompt_throughput_toks_per_s": "gauge",
    "vllm:avg_generation_throughput_toks_per_s": "gauge",
    "vllm:num_requests_waiting_by_reason": "gauge",
    "vllm:engine_sleep_state": "gauge",
    "vllm:prefix_cache_queries_total": "counter",
    "vllm:prefix_cache_hits_total": "counter",
    "vllm:num_preemptions_total": "counter",
    "vllm:prompt_tokens_by_source_total": "counter",
    "vllm:prompt_tokens_cached_total": "counter",
    "vllm:request_params_max_tokens": "histogram",
    "vllm:request_params_n": "histogram",
    "vllm:request_prefill_kv_computed_tokens": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:spec_decode_num_drafts_total": "counter",
    "vllm:spec_decode_num_draft_tokens_total": "counter",
    "vllm:spec_decode_num_accepted_tokens_total": "counter",
    "vllm:spec_decode_num_accepted_tokens_per_pos_total": "counter",
    "vllm:admission_rejections_total": "counter",
}
CHAPTER = {
    "vllm_num_requests_running": "gauge",
    "vllm_num_requests_waiting": "gauge",
    "vllm_kv_cache_usage_ratio": "gauge",
    "vllm_prompt_tokens_per_step": "gauge",
    "vllm_generation_tokens_per_step": "gauge",
    "vllm_preempted_requests_total": "counter",
    "vllm_prefix_cache_hit_ratio": "gauge",
}
CONTRACT = {**DASHBOARDS, **CONSUMERS, **CHAPTER}


@pytest.mark.parametrize("name", CONTRACT)
def test_g7_the_series_exists_at_zero_with_its_type_and_labels(name: str) -> None:
    family = read_families(ServerMetrics("tiny", max_model_len=2048))[name]
    assert family.type == CONTRACT[name]
    assert family.samples
    suffixes = ("_bucket", "_count", "_sum") if family.type == "histogram" else ("",)
    assert {sample.name for sample in family.samples} == {name + suffix for suffix in suffixes}
    for sample in family.samples:
        assert sample.labels.items() >= {("model_name", "tiny"), ("engine", "0")}
        assert sample.value == (sample.labels.get("sleep_state") == "awake")


@pytest.mark.parametrize(
    ("name", "label", "values"),
    [
        ("vllm:request_success_total", "finished_reason", {"stop", "length", "abort", "error", "repetition"}),
        ("vllm:num_requests_waiting_by_reason", "reason", {"capacity", "deferred"}),
        ("vllm:engine_sleep_state", "sleep_state", {"awake", "weights_offloaded", "discard_all"}),
        (
            "vllm:prompt_tokens_by_source_total",
            "source",
            {"local_compute", "local_cache_hit", "external_kv_transfer"},
        ),
        ("vllm:spec_decode_num_accepted_tokens_per_pos_total", "position", {"0"}),
        (
            "vllm:admission_rejections_total",
            "reason",
            {
                *(
                    "queue_full",
                    "queue_tokens_full",
                    "queue_timeout",
                    "request_timeout",
                    "draining",
                    "key_concurrency",
                    "key_rate",
                )
            },
        ),
    ],
)
def test_every_value_of_a_label_that_is_known_has_its_series_from_the_start(
    name: str, label: str, values: set[str]
) -> None:
    samples = read_families(ServerMetrics("tiny"))[name].samples
    assert {sample.labels[label] for sample in samples} == values
    assert {frozenset(sample.labels) for sample in samples} == {frozenset({label, *MODEL_LABELS})}


@pytest.mark.parametrize(
    ("name", "bounds"),
    [
        (
            "vllm:time_to_first_token_seconds",
            ".001 .005 .01 .02 .04 .06 .08 .1 .25 .5 .75 1 2.5 5 7.5 10 20 40 80 160 640 2560",
        ),
        ("vllm:inter_token_latency_seconds", ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80"),
        (
            "vllm:request_time_per_output_token_seconds",
            ".01 .025 .05 .075 .1 .15 .2 .3 .4 .5 .75 1 2.5 5 7.5 10 20 40 80",
        ),
        (
            "vllm:e2e_request_latency_seconds",
            ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680",
        ),
        (
            "vllm:request_queue_time_seconds",
            ".3 .5 .8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680",
        ),
        ("vllm:iteration_tokens_total", "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384"),
        ("vllm:request_params_n", "1 2 5 10 20"),
        ("vllm:request_prompt_tokens", "1 2 5 10 20 50 100 200 500 1000 2000"),
        ("vllm:request_params_max_tokens", "1 2 5 10 20 50 100 200 500 1000 2000"),
    ],
)
def test_buckets_are_vllms(name: str, bounds: str) -> None:
    samples = read_families(ServerMetrics("tiny", max_model_len=2048))[name].samples
    shown = [float(sample.labels["le"]) for sample in samples if sample.name == f"{name}_bucket"]
    assert shown == [*map(float, bounds.split()), float("inf")]


def test_g8_every_series_whose_labels_are_known_exists_from_the_start() -> None:
    fresh = set(read_samples(ServerMetrics("tiny")))
    assert {name for name, _ in fresh} >= {
        row.name + ("_count" if row.kind == "histogram" else "") for row in TABLE if not row.labels or row.values
    }


def test_the_table_names_each_metric_once_and_says_what_it_is() -> None:
    names = [row.name for row in TABLE]
    assert len(names) == len(set(names))
    for row in TABLE:
        assert row.help.endswith(".") and row.unit
        assert (row.kind == "counter") <= row.name.endswith("_total")
        assert (row.kind == "histogram") == bool(row.buckets)
        assert not row.alias_of or row.alias_of in names


def test_the_readme_shows_the_metrics_as_they_are() -> None:
    _, _, rest = README.read_text(encoding="utf-8").partition("<!-- metrics -->")
    shown, end, _ = rest.partition("<!-- /metrics -->")
    assert end, "README.md holds the list between <!-- metrics --> and <!-- /metrics -->"
    assert shown.strip() == metrics_table().strip(), "paste server.metrics_docs.metrics_table() into README.md"


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row.name)
def test_the_docs_name_every_metric(row: MetricRow) -> None:
    told, _, _ = metrics_table().partition("Buckets:")
    lines = [line for line in told.splitlines() if line.startswith(f"| `{row.name}` |")]
    assert len(lines) == 1
    assert lines[0].count("|") == (3 if row.alias_of else 7)
