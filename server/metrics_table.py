"""The one table of metrics: what each is called, what it counts and what a healthy value tells. Counts nothing itself.

vLLM's names, labels and buckets are kept to the letter, so that its dashboards, routers and autoscalers work unchanged.
Left out is what has no meaning here: multi-modal and LoRA figures, KV connectors, FLOPS, websockets, sampled blocks.
"""

from __future__ import annotations

from dataclasses import replace

from server.metric_row import (
    CHOICES,
    CONTEXT_TOKENS,
    FIRST_TOKEN_S,
    HTTP_S,
    REQUEST_S,
    STEP_TOKENS,
    TOKEN_GAP_S,
    Healthy,
    MetricRow,
    by_label,
    counter,
    gauge,
    histogram,
)

_STATE = (
    gauge(
        "vllm:num_requests_running",
        "requests",
        "Requests that hold KV blocks.",
        "Steady at 70 to 90 % of `--max-num-seqs`.",
        healthy=Healthy(low=0.7, high=0.9, share_of="pointsman:max_num_seqs"),
    ),
    gauge(
        "vllm:num_requests_waiting",
        "requests",
        "Requests waiting for admission, preempted ones included.",
        "0 most of the time, above for short bursts. Above 0 for long with running = `--max-num-seqs`: raise that. "
        "Above 0 with a KV usage below 50 %: look at `--delay-factor` and at what was aborted.",
        healthy=Healthy(high=0),
    ),
    by_label(
        "reason",
        ("capacity", "deferred"),
        gauge(
            "vllm:num_requests_waiting_by_reason",
            "requests",
            "The same by what they wait for: room, or a constraint or a step still under way.",
        ),
    ),
    gauge(
        "vllm:kv_cache_usage_perc",
        "0..1",
        "Share of the KV blocks in use; 1 = full.",
        "Steady at 0.4 to 0.8. Above 0.95 with preemptions rising: the pool starves; lower `--max-num-seqs` or give it "
        "more memory.",
        healthy=Healthy(low=0.4, high=0.8, alarm=0.95),
    ),
    by_label(
        "sleep_state",
        ("awake", "weights_offloaded", "discard_all"),
        gauge("vllm:engine_sleep_state", "0 or 1", "1 for the state that the engine is in; this one never sleeps."),
    ),
    gauge(
        "vllm:cache_config_info",
        "1",
        "The KV cache's size and kind, as labels; there once the model is loaded.",
        labels=(
            "block_size",
            "num_gpu_blocks",
            "num_cpu_blocks",
            "cache_dtype",
            "enable_prefix_caching",
            "kv_cache_memory_bytes",
        ),
    ),
)

_TOKENS = (
    counter("vllm:prompt_tokens_total", "tokens", "Prompt tokens of requests that reached their first token."),
    counter("vllm:generation_tokens_total", "tokens", "Tokens generated."),
    by_label(
        "source",
        ("local_compute", "local_cache_hit", "external_kv_transfer"),
        counter(
            "vllm:prompt_tokens_by_source_total", "tokens", "The prompt tokens by where their KV came from; adds up."
        ),
    ),
    counter("vllm:prompt_tokens_cached_total", "tokens", "Prompt tokens that were not computed: their KV was there."),
    counter("vllm:prefix_cache_queries_total", "tokens", "Prompt tokens looked up in the prefix cache."),
    counter(
        "vllm:prefix_cache_hits_total",
        "tokens",
        "Prompt tokens found in the prefix cache.",
        "Above 60 % of the queries where prompts share beginnings (RAG, long chats).",
    ),
    counter(
        "vllm:num_preemptions_total",
        "preemptions",
        "Times a running request lost its blocks to another.",
        "Flat over long times.",
        healthy=Healthy(high=0),
    ),
    histogram(
        "vllm:iteration_tokens_total",
        "tokens",
        STEP_TOKENS,
        "Tokens of one engine step: prompt tokens computed and tokens generated. Its count is the number of steps.",
    ),
)

_REQUESTS = (
    by_label(
        "finished_reason",
        ("stop", "length", "abort", "error", "repetition"),
        counter("vllm:request_success_total", "requests", "Requests ended, each once, by why.", "`error` stays at 0."),
    ),
    by_label(
        "reason",
        (
            *("queue_full", "queue_tokens_full", "queue_timeout", "request_timeout"),
            *("key_concurrency", "key_rate", "draining"),
        ),
        counter(
            "vllm:admission_rejections_total",
            "requests",
            "Requests turned away, or given up, although nothing is wrong with them, by why.",
            "Flat. `queue_*` rising: more load than this server takes; `key_*`: than one key may bring.",
        ),
    ),
    histogram(
        "vllm:time_to_first_token_seconds",
        "seconds",
        FIRST_TOKEN_S,
        "From a request's arrival to its first token, once a request, preempted or not.",
    ),
    histogram(
        "vllm:inter_token_latency_seconds",
        "seconds",
        TOKEN_GAP_S,
        "Between a request's outputs: how fluently its text comes.",
    ),
    histogram(
        "vllm:request_time_per_output_token_seconds",
        "seconds",
        TOKEN_GAP_S,
        "A request's mean time a token after its first; of requests with two or more.",
    ),
    histogram("vllm:e2e_request_latency_seconds", "seconds", REQUEST_S, "From a request's arrival to its end."),
    histogram(
        "vllm:request_queue_time_seconds",
        "seconds",
        REQUEST_S,
        "From arrival to the first admission; of requests known to have been admitted.",
    ),
    histogram(
        "vllm:request_prefill_time_seconds", "seconds", REQUEST_S, "From the first admission to the first token."
    ),
    histogram("vllm:request_decode_time_seconds", "seconds", REQUEST_S, "From the first token to the last."),
    histogram(
        "vllm:request_inference_time_seconds", "seconds", REQUEST_S, "From the first admission to the last token."
    ),
    histogram("vllm:request_prompt_tokens", "tokens", CONTEXT_TOKENS, "Prompt tokens of a request that ended."),
    histogram("vllm:request_generation_tokens", "tokens", CONTEXT_TOKENS, "Tokens that a request had got at its end."),
    histogram(
        "vllm:request_prefill_kv_computed_tokens",
        "tokens",
        CONTEXT_TOKENS,
        "Prompt tokens of a request that were computed: those not found in the cache.",
    ),
    histogram("vllm:request_params_max_tokens", "tokens", CONTEXT_TOKENS, "Output tokens a request might have had."),
    histogram("vllm:request_params_n", "choices", CHOICES, "Choices asked for; once for every n choices that ended."),
)

_SPECULATION = (
    counter("vllm:spec_decode_num_drafts_total", "drafts", "Times that a request got draft tokens to check."),
    counter("vllm:spec_decode_num_draft_tokens_total", "tokens", "Draft tokens scheduled."),
    counter("vllm:spec_decode_num_accepted_tokens_total", "tokens", "Draft tokens that the model agreed with."),
    by_label(
        "position",
        ("0",),
        counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
            "tokens",
            "The same by the draft's place among those of its step, from 0.",
        ),
    ),
)

_OWN = (
    gauge(
        "pointsman:event_loop_tasks",
        "tasks",
        "Tasks of the server's event loop: a few of its own, and some for each request.",
        "The same few whenever nothing runs.",
    ),
    gauge(
        "pointsman:num_permits",
        "requests",
        "Clients' requests for the engine that were let in and are not answered to the end: no text work.",
        "0 when idle.",
    ),
    gauge(
        "pointsman:num_requests_queued",
        "requests",
        "Requests, one a choice, admitted and not yet scheduled for the first time.",
        "Below `--max-queued-requests`.",
    ),
    gauge("pointsman:num_tokens_queued", "tokens", "Their prompt tokens.", "Below `--max-queued-tokens`."),
    gauge("pointsman:max_num_seqs", "requests", "Requests that may run at once, now: `--max-num-seqs`, or lowered."),
    gauge("pointsman:ready", "0 or 1", "1 while /ready answers 200: requests may be sent here.", "1."),
    gauge(
        "pointsman:seconds_since_progress",
        "seconds",
        "Age of the engine's last sign of life while it has work; 0 when idle.",
        "Below 2; above, /ready says 503.",
        healthy=Healthy(high=2, alarm=30),
    ),
    gauge(
        "pointsman:last_step_timestamp_seconds",
        "seconds",
        "Unix time at which the last step's results came; 0 before the first.",
    ),
    gauge(
        "pointsman:num_live_requests",
        "requests",
        "Requests that somebody still waits for.",
        "Never for long below running + waiting: those left over would have leaked.",
    ),
    gauge("pointsman:num_requests_parked", "requests", "Preempted requests whose last output is still under way."),
    counter("pointsman:prompt_tokens_scheduled_total", "tokens", "Prompt tokens handed out, recomputed ones included."),
    counter(
        "pointsman:resumed_prefix_cache_queries_total",
        "tokens",
        "Tokens looked up when preempted requests came back.",
    ),
    counter(
        "pointsman:resumed_prefix_cache_hits_total", "tokens", "Of those, found: what the preemption did not cost."
    ),
    counter(
        "pointsman:num_stalls_total", "steps", "Steps that gave nobody a token although requests were running.", "0."
    ),
    counter(
        "pointsman:watchdog_near_misses_total",
        "times",
        "Times that nothing moved for half of `--watchdog-timeout-s`; the log shows what each thread did.",
        "0.",
    ),
    counter("pointsman:schedule_time_seconds_total", "seconds", "Time spent deciding what the steps compute."),
    counter("pointsman:update_time_seconds_total", "seconds", "Time spent taking in what the steps computed."),
    MetricRow(
        name="pointsman:unknown_fields_total",
        kind="counter",
        unit="requests",
        help="Requests with a field that was ignored, by the field's name.",
        labels=("field",),
        tells="A name that rises is a typing error or a feature that somebody misses.",
    ),
    by_label(
        "reason",
        ("no_key", "unknown_key", "scope", "host", "origin"),
        counter(
            "pointsman:access_refusals_total",
            "requests",
            "Requests that did not come in: without a key, with an unknown one or one of too small a scope, for "
            "another host, from another site's page.",
            "Flat. `unknown_key` rising steadily: somebody tries keys, or a client has an old one.",
        ),
    ),
    MetricRow(
        name="http_requests_total",
        kind="counter",
        unit="requests",
        help="HTTP requests by method, class of status (2xx) and route; probes and /metrics are not counted.",
        labels=("method", "status", "handler"),
        tells="5xx stays flat.",
        has_model_labels=False,
    ),
    MetricRow(
        name="http_request_duration_seconds",
        kind="histogram",
        unit="seconds",
        help="From a request's head to the last byte of its answer, by method and route.",
        labels=("method", "handler"),
        buckets=HTTP_S,
        has_model_labels=False,
    ),
)

_THROUGHPUT_TELLS = "Of the last 10 seconds; `rate()` over the counters is better."
# The seven of the book chapter that the scheduler is built after, under its names.
_CHAPTER = (
    gauge(
        "vllm_prompt_tokens_per_step",
        "tokens",
        "Prompt tokens that the last step computed; 0 when nothing runs.",
        "High when large prompts come, low in between. 0 for long while requests wait: they are held back.",
    ),
    gauge(
        "vllm_generation_tokens_per_step",
        "tokens",
        "Tokens that the last step generated; 0 when nothing runs.",
        "About the number of running requests.",
    ),
    gauge(
        "vllm_prefix_cache_hit_ratio",
        "0..1",
        "Prefix cache hits by queries, since the start; 0 before the first.",
        "Above 0.6 where prompts share beginnings.",
        healthy=Healthy(low=0.6, is_low_bad=True),
    ),
)

_REMOVED = (
    gauge("vllm:avg_prompt_throughput_toks_per_s", "tokens/s", "Prompt tokens a second.", _THROUGHPUT_TELLS),
    gauge("vllm:avg_generation_throughput_toks_per_s", "tokens/s", "Generated tokens a second.", _THROUGHPUT_TELLS),
    gauge("vllm:num_requests_swapped", "requests", "Always 0: a preempted request is computed again, not swapped out."),
    gauge("vllm:cpu_cache_usage_perc", "0..1", "Always 0: there is no swap space."),
)

_ALIASES = (
    ("vllm:request_max_num_generation_tokens", "vllm:request_generation_tokens"),
    ("vllm:gpu_cache_usage_perc", "vllm:kv_cache_usage_perc"),
    ("vllm:gpu_prefix_cache_queries_total", "vllm:prefix_cache_queries_total"),
    ("vllm:gpu_prefix_cache_hits_total", "vllm:prefix_cache_hits_total"),
    ("vllm:time_per_output_token_seconds", "vllm:inter_token_latency_seconds"),
    ("vllm_num_requests_running", "vllm:num_requests_running"),
    ("vllm_num_requests_waiting", "vllm:num_requests_waiting"),
    ("vllm_kv_cache_usage_ratio", "vllm:kv_cache_usage_perc"),
    ("vllm_preempted_requests_total", "vllm:num_preemptions_total"),
)


def _build_alias(name: str, row: MetricRow) -> MetricRow:
    # What a healthy value is stands at the row itself.
    return replace(row, name=name, help=f"The same as {row.name}.", tells="", alias_of=row.name)


_ROWS = (*_STATE, *_TOKENS, *_REQUESTS, *_SPECULATION, *_OWN, *_CHAPTER, *_REMOVED)
_BY_NAME = {row.name: row for row in _ROWS}
TABLE = (*_ROWS, *(_build_alias(name, _BY_NAME[source]) for name, source in _ALIASES))
