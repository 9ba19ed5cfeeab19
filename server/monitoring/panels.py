"""What the dashboard shows: first an overview, then the scheduler, latencies, traffic and the process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from server.metric_row import Healthy
from server.monitoring.panel import Panel
from server.monitoring.thresholds import ERROR_SHARE, FIRST_TOKEN, TOKEN_GAP, find_range

_NONE = Healthy(high=0)
_TOKENS_A_SECOND = "suffix: tok/s"
_STEPS = "rate(vllm:iteration_tokens_total_count[R])"


@dataclass(frozen=True, slots=True)
class Section:
    """Panels under a common title.

    Attributes:
        title: Theirs.
        panels: From the left, and line by line.
        is_folded: Whether somebody must open it to see them.
    """

    title: str
    panels: tuple[Panel, ...]
    is_folded: bool = False


def _stat(title: str, query: str, unit: str, healthy: Healthy | None = None, note: str = "") -> Panel:
    queries = {"": query}
    return Panel(title=title, queries=queries, unit=unit, kind="stat", width=4, height=4, healthy=healthy, note=note)


def _quantile(share: float, histogram: str) -> str:
    return f"histogram_quantile({share}, sum by (le) (rate({histogram}_bucket[R])))"


def _mean(histogram: str) -> str:
    return f"sum(rate({histogram}_sum[R])) / sum(rate({histogram}_count[R]))"


def _spread(title: str, histogram: str, unit: str, healthy: Healthy | None = None) -> Panel:
    """How a histogram's values are spread, over time."""
    queries = {f"p{share * 100:g}": _quantile(share, histogram) for share in (0.5, 0.95, 0.99)}
    return Panel(title=title, queries={**queries, "mean": _mean(histogram)}, unit=unit, healthy=healthy)


def _lines(title: str, queries: Mapping[str, str], unit: str, healthy: Healthy | None = None, note: str = "") -> Panel:
    return Panel(title=title, queries=queries, unit=unit, healthy=healthy, note=note)


OVERVIEW = Section(
    "Overview",
    (
        _stat("Servers ready", "sum(pointsman:ready)", "short"),
        _stat(
            "Alerts",
            'count(ALERTS{alertname=~"Pointsman.*", alertstate="firing"}) or vector(0)',
            "short",
            Healthy(alarm=1),
        ),
        _stat(
            "Places taken",
            "sum(vllm:num_requests_running) / sum(pointsman:max_num_seqs)",
            "percentunit",
            find_range("vllm:num_requests_running"),
            "Running requests by `--max-num-seqs`.",
        ),
        _stat("Waiting", "sum(vllm:num_requests_waiting)", "short", find_range("vllm:num_requests_waiting")),
        _stat("KV cache", "max(vllm:kv_cache_usage_perc)", "percentunit", find_range("vllm:kv_cache_usage_perc")),
        _stat(
            "Preemptions a minute",
            "sum(rate(vllm:num_preemptions_total[R])) * 60",
            "cpm",
            find_range("vllm:num_preemptions_total"),
        ),
        _stat("Requests", "sum(rate(vllm:request_success_total[R]))", "reqps"),
        _stat("Output tokens", "sum(rate(vllm:generation_tokens_total[R]))", _TOKENS_A_SECOND),
        _stat("TTFT p95", _quantile(0.95, "vllm:time_to_first_token_seconds"), "s", FIRST_TOKEN),
        _stat("Token gap p95", _quantile(0.95, "vllm:inter_token_latency_seconds"), "s", TOKEN_GAP),
        _stat(
            "Prefix hits",
            "sum(rate(vllm:prefix_cache_hits_total[R])) / sum(rate(vllm:prefix_cache_queries_total[R]))",
            "percentunit",
            find_range("vllm_prefix_cache_hit_ratio"),
        ),
        _stat(
            "Errors",
            '(sum(rate(http_requests_total{status="5xx"}[R])) or vector(0)) / sum(rate(http_requests_total[R]))',
            "percentunit",
            ERROR_SHARE,
        ),
    ),
)

SCHEDULER = Section(
    "Scheduler",
    (
        _lines(
            "Requests running",
            {
                "running {{instance}}": "vllm:num_requests_running",
                "most that may {{instance}}": "pointsman:max_num_seqs",
                "live {{instance}}": "pointsman:num_live_requests",
            },
            "short",
        ),
        _lines(
            "Requests waiting by reason",
            {
                "{{reason}} {{instance}}": "vllm:num_requests_waiting_by_reason",
                "all {{instance}}": "vllm:num_requests_waiting",
                "parked {{instance}}": "pointsman:num_requests_parked",
            },
            "short",
        ),
        Panel(
            title="KV cache usage",
            queries={"{{instance}}": "vllm:kv_cache_usage_perc"},
            unit="percentunit",
            healthy=find_range("vllm:kv_cache_usage_perc"),
            maximum=1,
        ),
        _lines(
            "Tokens a step",
            {
                "prompt {{instance}}": "vllm_prompt_tokens_per_step",
                "generated {{instance}}": "vllm_generation_tokens_per_step",
                "mean of both": _mean("vllm:iteration_tokens_total"),
            },
            "short",
            note="Generated tokens follow the number of running requests; prompt tokens come and go.",
        ),
        _lines("Preemptions", {"{{instance}}": "rate(vllm:num_preemptions_total[R]) * 60"}, "cpm", _NONE),
        Panel(
            title="Prefix cache hits",
            queries={
                "{{instance}}": "rate(vllm:prefix_cache_hits_total[R]) / rate(vllm:prefix_cache_queries_total[R])",
                "since the start {{instance}}": "vllm_prefix_cache_hit_ratio",
            },
            unit="percentunit",
            healthy=find_range("vllm_prefix_cache_hit_ratio"),
            maximum=1,
        ),
        _lines(
            "Scheduling",
            {
                "steps {{instance}}": _STEPS,
                "stalls {{instance}}": "rate(pointsman:num_stalls_total[R])",
            },
            "ops",
        ),
        _lines(
            "Scheduler's time a step",
            {
                "schedule {{instance}}": f"rate(pointsman:schedule_time_seconds_total[R]) / {_STEPS}",
                "update {{instance}}": f"rate(pointsman:update_time_seconds_total[R]) / {_STEPS}",
            },
            "s",
        ),
        _lines(
            "Engine's silence",
            {"{{instance}}": "pointsman:seconds_since_progress"},
            "s",
            find_range("pointsman:seconds_since_progress"),
        ),
    ),
)

LATENCY = Section(
    "Latency",
    (
        _spread("TTFT", "vllm:time_to_first_token_seconds", "s", FIRST_TOKEN),
        _spread("Inter-token latency", "vllm:inter_token_latency_seconds", "s", TOKEN_GAP),
        _spread("E2E latency", "vllm:e2e_request_latency_seconds", "s"),
        _spread("Queue time", "vllm:request_queue_time_seconds", "s"),
        _spread("Prefill time", "vllm:request_prefill_time_seconds", "s"),
        _spread("Decode time", "vllm:request_decode_time_seconds", "s"),
        _spread("Time in the engine", "vllm:request_inference_time_seconds", "s"),
        _spread("Time per output token", "vllm:request_time_per_output_token_seconds", "s"),
        _lines(
            "HTTP request duration",
            {
                "p50 {{handler}}": "histogram_quantile(0.5, sum by (handler, le) (rate("
                "http_request_duration_seconds_bucket[R])))",
                "p95 {{handler}}": "histogram_quantile(0.95, sum by (handler, le) (rate("
                "http_request_duration_seconds_bucket[R])))",
            },
            "s",
        ),
    ),
)

TRAFFIC = Section(
    "Traffic",
    (
        _lines(
            "Tokens",
            {
                "prompt": "sum(rate(vllm:prompt_tokens_total[R]))",
                "generated": "sum(rate(vllm:generation_tokens_total[R]))",
                "prompt, scheduled": "sum(rate(pointsman:prompt_tokens_scheduled_total[R]))",
            },
            _TOKENS_A_SECOND,
            note="What is scheduled beyond the prompts was lost to preemptions, and is computed again.",
        ),
        _lines(
            "Prompt tokens by source",
            {
                "{{source}}": "sum by (source) (rate(vllm:prompt_tokens_by_source_total[R]))",
                "cached": "sum(rate(vllm:prompt_tokens_cached_total[R]))",
            },
            _TOKENS_A_SECOND,
        ),
        _lines(
            "Requests by their end",
            {"{{finished_reason}}": "sum by (finished_reason) (rate(vllm:request_success_total[R]))"},
            "reqps",
        ),
        _lines("HTTP requests by status", {"{{status}}": "sum by (status) (rate(http_requests_total[R]))"}, "reqps"),
        _lines(
            "Rejections",
            {"{{reason}}": "sum by (reason) (rate(vllm:admission_rejections_total[R]))"},
            "reqps",
            _NONE,
        ),
        _lines(
            "Resumed prefix hits",
            {
                "looked up {{instance}}": "rate(pointsman:resumed_prefix_cache_queries_total[R])",
                "found {{instance}}": "rate(pointsman:resumed_prefix_cache_hits_total[R])",
            },
            _TOKENS_A_SECOND,
        ),
        _spread("Prompt length", "vllm:request_prompt_tokens", "short"),
        _spread("Output length", "vllm:request_generation_tokens", "short"),
        _spread("Prompt tokens computed", "vllm:request_prefill_kv_computed_tokens", "short"),
        _lines(
            "What was asked for",
            {
                "max_tokens p50": _quantile(0.5, "vllm:request_params_max_tokens"),
                "max_tokens p95": _quantile(0.95, "vllm:request_params_max_tokens"),
                "n p95": _quantile(0.95, "vllm:request_params_n"),
            },
            "short",
        ),
        _lines("Unknown fields", {"{{field}}": "sum by (field) (rate(pointsman:unknown_fields_total[R]))"}, "reqps"),
    ),
)

PROCESS = Section(
    "Process",
    (
        _lines("Memory", {"{{instance}}": "process_resident_memory_bytes"}, "bytes"),
        _lines("CPU", {"{{instance}}": "rate(process_cpu_seconds_total[R])"}, "short", note="Cores at work."),
        _lines("Open files", {"{{instance}}": "process_open_fds", "limit {{instance}}": "process_max_fds"}, "short"),
        _lines("Up", {"{{instance}}": "up", "ready {{instance}}": "pointsman:ready"}, "short"),
        _lines("Started", {"{{instance}}": "process_start_time_seconds * 1000"}, "dateTimeFromNow"),
        _lines("Last step", {"{{instance}}": "pointsman:last_step_timestamp_seconds * 1000"}, "dateTimeFromNow"),
        Panel(
            title="KV cache of each server",
            queries={
                "{{instance}}: {{num_gpu_blocks}} blocks of {{block_size}} tokens, {{cache_dtype}}": "vllm:cache_config_info"
            },
            unit="short",
            kind="name",
            width=24,
            height=3,
        ),
    ),
)

SPECULATION = Section(
    "Speculative decoding",
    (
        _lines(
            "Accepted drafts",
            {
                "share": "sum(rate(vllm:spec_decode_num_accepted_tokens_total[R]))"
                " / sum(rate(vllm:spec_decode_num_draft_tokens_total[R]))"
            },
            "percentunit",
        ),
        _lines(
            "Drafts",
            {
                "drafts": "sum(rate(vllm:spec_decode_num_drafts_total[R]))",
                "tokens": "sum(rate(vllm:spec_decode_num_draft_tokens_total[R]))",
            },
            "ops",
        ),
        _lines(
            "Accepted by position",
            {"{{position}}": "sum by (position) (rate(vllm:spec_decode_num_accepted_tokens_per_pos_total[R]))"},
            "ops",
        ),
    ),
    is_folded=True,
)

SECTIONS = (OVERVIEW, SCHEDULER, LATENCY, TRAFFIC, PROCESS, SPECULATION)
