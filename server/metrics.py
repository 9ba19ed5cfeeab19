"""ServerMetrics: what the output processor, the scheduler and the HTTP layer counted becomes the page at /metrics.

Knows nothing of how they count. Each name that it writes is a row of metrics_table.py, which says what it means. One
thread records and renders; recording never raises.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Concatenate, ParamSpec

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector, generate_latest

from engine_core import EngineState, SchedulerStats
from server.field_names import clean_field_name
from server.metric_row import MetricRow
from server.metric_series import Counter, Family, Gauge, Histogram, RateWindow
from server.metrics_table import TABLE
from server.records import RequestRecord, StepRecord

logger = logging.getLogger(__name__)
P = ParamSpec("P")

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Only one engine lives in this process; dashboards group by the label all the same.
_ENGINE = "0"
_MAX_FIELD_NAMES = 64
# As http_metrics.py calls a method or a route that is none of ours.
_UNKNOWN = "other"


def _never_raises(
    method: Callable[Concatenate[ServerMetrics, P], None],
) -> Callable[Concatenate[ServerMetrics, P], None]:
    """A metric that cannot be recorded is logged, once; it must not cost a client its answer."""

    @functools.wraps(method)
    def guarded(self: ServerMetrics, /, *args: P.args, **kwargs: P.kwargs) -> None:
        try:
            method(self, *args, **kwargs)
        except Exception:
            if not self._has_failed:
                logger.exception("metrics are incomplete from here on: one could not be recorded")
            self._has_failed = True

    return guarded


def _count_tasks() -> int:
    """Return the tasks of the running loop; 0 where none runs on this thread."""
    try:
        return len(asyncio.all_tasks())
    except RuntimeError:
        return 0


class ServerMetrics:
    """The metrics of one server.

    Args:
        model_name: The ``model_name`` label: the name under which the model is served.
        max_model_len: The context in tokens: so far go the buckets of token counts.
        clock: Seconds, monotonic.
        unix_time: Seconds since 1970, for the one gauge that is a time.
    """

    def __init__(
        self,
        model_name: str,
        *,
        max_model_len: int = 8192,
        clock: Callable[[], float] = time.monotonic,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        self._has_failed = False
        self._unix_time = unix_time
        self._field_names: set[str] = set()
        self._num_ended_by_n: dict[int, int] = {}
        self._prompt_rate, self._generation_rate = RateWindow(clock), RateWindow(clock)
        self._watched: list[Callable[[], Mapping[str, float]]] = []
        self._gauges: dict[str, Family[Gauge]] = {}
        self._counters: dict[str, Family[Counter]] = {}
        self._histograms: dict[str, Family[Histogram]] = {}
        labels = {"model_name": model_name, "engine": _ENGINE}
        for row in TABLE:
            if not row.alias_of:
                self._create(row, labels, max_model_len)
        self._gauge("vllm:engine_sleep_state", "awake").set(1)
        self._process = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._process)

    def record_step(self, record: StepRecord, stats: SchedulerStats | None) -> None:
        """Add one step.

        Args:
            record: What it meant to its requests.
            stats: The scheduler's figures after it; None where it gave none.
        """
        if stats is not None:
            self._record_scheduler(stats)
        self._record_tokens(record)
        for request in record.ended:
            self._record_end(request)

    @_never_raises
    def record_http(self, *, method: str, status: str, handler: str, duration_s: float) -> None:
        """Add one answered HTTP request. The labels must not be a client's words.

        Args:
            method: In capitals.
            status: Its class, such as 2xx.
            handler: The route's path.
            duration_s: From the request's head to the end of the answer.
        """
        self._counter("http_requests_total", method, status, handler).inc()
        self._histogram("http_request_duration_seconds", method, handler).observe(duration_s)

    @_never_raises
    def count_refusal(self, status: int) -> None:
        """Count a request that was refused before its method or path were known. It took no time worth measuring.

        Args:
            status: Of the answer.
        """
        self._counter("http_requests_total", _UNKNOWN, f"{status // 100}xx", _UNKNOWN).inc()

    @_never_raises
    def count_watchdog_near_miss(self) -> None:
        """Count that the engine or the event loop stood still for half of the watchdog's deadline."""
        self._counter("pointsman:watchdog_near_misses_total").inc()

    @_never_raises
    def count_access_refusal(self, reason: str) -> None:
        """Count a request that did not come in.

        Args:
            reason: A Refusal's value.
        """
        self._counter("pointsman:access_refusals_total", reason).inc()

    @_never_raises
    def count_rejection(self, reason: str) -> None:
        """Count a request that was turned away though nothing is wrong with it.

        Args:
            reason: Why; one of the table's, never a client's word.
        """
        self._counter("vllm:admission_rejections_total", reason).inc()

    @_never_raises
    def set_cache_config(self, state: EngineState, *, cache_dtype: str, enable_prefix_caching: bool) -> None:
        """Show the KV cache's size and kind; once, when the engine is ready.

        Args:
            state: The engine's.
            cache_dtype: As configured.
            enable_prefix_caching: As configured.
        """
        labels = (state.block_size, state.num_blocks, 0, cache_dtype, enable_prefix_caching, state.kv_bytes)
        self._gauge("vllm:cache_config_info", *map(str, labels)).set(1)

    def watch(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Read gauges whenever the page is rendered: so they are right, whoever changes what they tell.

        Args:
            read: Returns them by name.
        """
        self._watched.append(read)

    @_never_raises
    def count_unknown_field(self, name: str) -> None:
        """Count a request field that was ignored. Clients choose the names, so only the first few get a series."""
        name = clean_field_name(name)
        if name not in self._field_names:
            if len(self._field_names) >= _MAX_FIELD_NAMES:
                name = "(other)"
            else:
                self._field_names.add(name)
        self._counter("pointsman:unknown_fields_total", name).inc()

    def get_values(self, metrics: Iterable[Sequence[str]]) -> list[float]:
        """Return what /metrics shows now at gauges and counters.

        Args:
            metrics: Of each its name, a row of the table and no alias, and the values of its own labels.
        """
        self._refresh()
        values = []
        for name, *labels in metrics:
            series = self._gauge(name, *labels) if name in self._gauges else self._counter(name, *labels)
            ((_, _, value),) = series.samples()
            values.append(value)
        return values

    def render(self) -> tuple[bytes, str]:
        """Return the body of /metrics and its content type. However many ask, none changes what another sees."""
        self._refresh()
        families: dict[str, Family[Gauge] | Family[Counter] | Family[Histogram]]
        families = {**self._gauges, **self._counters, **self._histograms}
        text = "".join(line for row in TABLE for line in families[row.alias_of or row.name].write(row))
        return text.encode() + generate_latest(self._process), CONTENT_TYPE

    def _refresh(self) -> None:
        """Bring up to date what follows from other figures or from the time."""
        self._gauge("vllm:avg_prompt_throughput_toks_per_s").set(self._prompt_rate.get_rate())
        self._gauge("vllm:avg_generation_throughput_toks_per_s").set(self._generation_rate.get_rate())
        self._gauge("pointsman:event_loop_tasks").set(_count_tasks())
        queries = self._counter("vllm:prefix_cache_queries_total").value
        hits = self._counter("vllm:prefix_cache_hits_total").value
        self._gauge("vllm_prefix_cache_hit_ratio").set(hits / queries if queries else 0.0)
        self._read_watched()

    @_never_raises
    def _read_watched(self) -> None:
        for read in self._watched:
            for name, value in read().items():
                self._gauge(name).set(value)

    # ------------------------------------------------------------------ requests
    @_never_raises
    def _record_tokens(self, record: StepRecord) -> None:
        started = record.started
        num_prompt = sum(request.num_prompt_tokens for request in started)
        num_cached = sum(request.num_cached_tokens for request in started)
        self._counter("vllm:prompt_tokens_total").inc(num_prompt)
        self._counter("vllm:prompt_tokens_cached_total").inc(num_cached)
        self._counter("vllm:prompt_tokens_by_source_total", "local_compute").inc(num_prompt - num_cached)
        self._counter("vllm:prompt_tokens_by_source_total", "local_cache_hit").inc(num_cached)
        self._counter("vllm:generation_tokens_total").inc(record.num_generation_tokens)
        self._prompt_rate.add(num_prompt)
        self._generation_rate.add(record.num_generation_tokens)
        self._histogram("vllm:time_to_first_token_seconds").observe_all(
            [each.first_token_time - each.arrival_time for each in started if each.first_token_time is not None]
        )
        self._histogram("vllm:inter_token_latency_seconds").observe_all(record.token_gap_s)

    @_never_raises
    def _record_end(self, request: RequestRecord) -> None:
        assert request.end_time is not None and request.finish_reason is not None, "it has ended"
        self._counter("vllm:request_success_total", request.finish_reason.value).inc()
        self._histogram("vllm:e2e_request_latency_seconds").observe(request.end_time - request.arrival_time)
        self._histogram("vllm:request_prompt_tokens").observe(request.num_prompt_tokens)
        self._histogram("vllm:request_generation_tokens").observe(request.num_output_tokens)
        self._histogram("vllm:request_params_max_tokens").observe(request.max_tokens)
        self._record_choice(request.n)
        if request.first_scheduled_time is not None:
            waited_s = request.first_scheduled_time - request.arrival_time
            self._histogram("vllm:request_queue_time_seconds").observe(waited_s)
        self._record_phases(request)

    def _record_choice(self, n: int) -> None:
        """Each choice is a request here, but the client asked once: every n-th end of such a choice counts."""
        self._num_ended_by_n[n] = num_ended = self._num_ended_by_n.get(n, 0) + 1
        if num_ended % n == 0:
            self._histogram("vllm:request_params_n").observe(n)

    def _record_phases(self, request: RequestRecord) -> None:
        """Add how long the engine worked on a request that got at least one token."""
        first, last, scheduled = request.first_token_time, request.last_token_time, request.first_scheduled_time
        if first is None or last is None:
            return
        num_computed = request.num_prompt_tokens - request.num_cached_tokens
        self._histogram("vllm:request_prefill_kv_computed_tokens").observe(num_computed)
        self._histogram("vllm:request_decode_time_seconds").observe(last - first)
        if request.num_output_tokens > 1:
            mean_s = (last - first) / (request.num_output_tokens - 1)
            self._histogram("vllm:request_time_per_output_token_seconds").observe(mean_s)
        if scheduled is not None:
            self._histogram("vllm:request_prefill_time_seconds").observe(first - scheduled)
            self._histogram("vllm:request_inference_time_seconds").observe(last - scheduled)

    @_never_raises
    def _record_scheduler(self, stats: SchedulerStats) -> None:
        num_deferred = stats.num_parked + stats.num_held_back
        self._gauge("vllm:num_requests_running").set(stats.num_running)
        self._gauge("vllm:num_requests_waiting").set(stats.num_waiting)
        self._gauge("vllm:num_requests_waiting_by_reason", "deferred").set(num_deferred)
        self._gauge("vllm:num_requests_waiting_by_reason", "capacity").set(stats.num_waiting - num_deferred)
        self._gauge("vllm:kv_cache_usage_perc").set(stats.kv_cache_usage)
        self._gauge("pointsman:num_requests_parked").set(stats.num_parked)
        self._counter("vllm:num_preemptions_total").inc(stats.num_preempted)
        self._counter("vllm:prefix_cache_queries_total").inc(stats.num_prefix_queries)
        self._counter("vllm:prefix_cache_hits_total").inc(stats.num_prefix_hits)
        self._counter("pointsman:prompt_tokens_scheduled_total").inc(stats.num_prompt_tokens)
        self._counter("pointsman:resumed_prefix_cache_queries_total").inc(stats.num_resumed_queries)
        self._counter("pointsman:resumed_prefix_cache_hits_total").inc(stats.num_resumed_hits)
        self._counter("pointsman:num_stalls_total").inc(stats.num_stalls)
        self._counter("pointsman:schedule_time_seconds_total").inc(stats.schedule_time_s)
        self._counter("pointsman:update_time_seconds_total").inc(stats.update_time_s)
        self._record_iteration(stats)
        if stats.num_drafts or stats.num_accepted_tokens:
            self._record_drafts(stats)

    def _record_iteration(self, stats: SchedulerStats) -> None:
        num_prompt, num_generated = stats.num_step_prompt_tokens, stats.num_step_generation_tokens
        if stats.num_steps:
            self._gauge("pointsman:last_step_timestamp_seconds").set(self._unix_time())
            # As in vLLM, the token that a prompt's end samples counts, a rejected draft does not.
            self._histogram("vllm:iteration_tokens_total").observe(num_prompt + num_generated)
        elif stats.num_running:
            return
        # The last step's figures must not stand there for ever once nothing runs (report G1).
        is_running = stats.num_running > 0
        self._gauge("vllm_prompt_tokens_per_step").set(num_prompt if is_running else 0)
        self._gauge("vllm_generation_tokens_per_step").set(num_generated if is_running else 0)

    def _record_drafts(self, stats: SchedulerStats) -> None:
        self._counter("vllm:spec_decode_num_drafts_total").inc(stats.num_drafts)
        self._counter("vllm:spec_decode_num_draft_tokens_total").inc(stats.num_draft_tokens)
        self._counter("vllm:spec_decode_num_accepted_tokens_total").inc(sum(stats.num_accepted_tokens))
        for position, num_accepted in enumerate(stats.num_accepted_tokens):
            self._counter("vllm:spec_decode_num_accepted_tokens_per_pos_total", str(position)).inc(num_accepted)

    # ------------------------------------------------------------------ series
    def _create(self, row: MetricRow, labels: dict[str, str], max_model_len: int) -> None:
        if row.kind == "gauge":
            self._gauges[row.name] = Family(row, labels, Gauge)
        elif row.kind == "counter":
            self._counters[row.name] = Family(row, labels, Counter)
        else:
            self._histograms[row.name] = Family(row, labels, functools.partial(Histogram, row.bounds(max_model_len)))

    def _gauge(self, name: str, *labels: str) -> Gauge:
        return self._gauges[name].at(*labels)

    def _counter(self, name: str, *labels: str) -> Counter:
        return self._counters[name].at(*labels)

    def _histogram(self, name: str, *labels: str) -> Histogram:
        return self._histograms[name].at(*labels)
