"""What vLLM's own Grafana dashboards ask, as far as they show the server and not the machine around it.

Source: vllm-project/vllm, examples/observability: prometheus_grafana/grafana.json and dashboards/grafana's
performance_statistics.json, query_statistics.json and vllm_service_status.json.
"""

from __future__ import annotations

from collections.abc import Iterator

E2E, ITL, TTFT = (
    "vllm:e2e_request_latency_seconds",
    "vllm:inter_token_latency_seconds",
    "vllm:time_to_first_token_seconds",
)
PROMPT, GENERATED, ENDED = "vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:request_success_total"


def build_queries(model_name: str, window: str) -> list[str]:
    """Return all of them.

    Args:
        model_name: Chosen at their head.
        window: What Grafana puts for $__rate_interval, $__interval and $__range.
    """
    return [
        *_build_main(f'{{model_name="{model_name}"}}', f"[{window}]"),
        *_build_performance(f"[{window}]"),
        *_build_queries(f'{{model_name=~"{model_name}"}}', f"[{window}]"),
        *_build_status(f'job=~".*", model_name=~"{model_name}", instance=~".*"', f"[{window}]"),
    ]


def _build_main(of: str, window: str) -> Iterator[str]:
    for name in (E2E, ITL, TTFT):
        for share in (0.99, 0.95, 0.9, 0.5):
            yield f"histogram_quantile({share}, sum by(le) (rate({name}_bucket{of}{window})))"
        yield f"rate({name}_sum{of}{window}) / rate({name}_count{of}{window})"
    for name in (PROMPT, GENERATED):
        yield f"rate({name}{of}{window})"
    for name in ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"):
        yield f"{name}{of}"
    for name in ("vllm:request_prompt_tokens", "vllm:request_generation_tokens"):
        yield f"sum by(le) (increase({name}_bucket{of}{window}))"
    yield f"sum by(finished_reason) (increase({ENDED}{of}{window}))"
    for name in (
        *("vllm:request_queue_time_seconds", "vllm:request_prefill_time_seconds", "vllm:request_decode_time_seconds"),
        "vllm:request_max_num_generation_tokens",
    ):
        yield f"rate({name}_sum{of}{window})"


def _build_performance(window: str) -> Iterator[str]:
    for name in (E2E, TTFT, ITL):
        yield f"rate({name}_sum{window}) / rate({name}_count{window})"
        for share in (0.99, 0.90, 0.50):
            yield f"histogram_quantile({share}, sum by(le) (rate({name}_bucket{window})))"
        yield f"(sum(increase({name}_sum{window})) / sum(increase({name}_count{window})))"
    for name in (GENERATED, PROMPT, "vllm:iteration_tokens_total_count"):
        yield f"rate({name}{window})"


def _build_queries(of: str, window: str) -> Iterator[str]:
    yield f"sum by (model_name) (rate({ENDED}{of}{window}))"
    yield f"sum(rate({ENDED}{of}{window}))"
    for name in (E2E, "vllm:request_prompt_tokens"):
        for share in (0.50, 0.90, 0.99):
            yield f"histogram_quantile({share}, sum by(le, model_name) (rate({name}_bucket{of}{window})))"
    yield f"sum by (le, model_name) (rate(vllm:request_prompt_tokens_bucket{of}{window}))"
    yield f"sum(rate({PROMPT}{of}{window})) / sum(rate({ENDED}{of}{window}))"
    for name in (PROMPT, GENERATED):
        yield f"sum by (model_name) (rate({name}{of}{window}))"
        yield f"sum(rate({name}{of}{window}))"


def _build_status(of: str, window: str) -> Iterator[str]:
    yield f'(2 - (max(vllm:engine_sleep_state{{{of}, sleep_state="awake"}}) == bool 0)) or vector(0)'
    ended = f"sum(rate({ENDED}{{{of}}}{window}))"
    for shown in (
        f"histogram_quantile(0.5, sum by (le) (rate({TTFT}_bucket{{{of}}}{window})))",
        f"sum(rate({GENERATED}{{{of}}}{window})) / (sum(avg_over_time(vllm:num_requests_running{{{of}}}{window})) > 0)",
        f'1 - (sum(rate({ENDED}{{{of}, finished_reason="error"}}{window})) / ({ended} > 0))',
        f"60 * {ended}",
    ):
        yield shown
        yield f"({shown}) and on () count(vllm:num_requests_running{{{of}}})"
