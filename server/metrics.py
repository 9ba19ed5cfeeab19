"""Every Prometheus metric, in one table: under vLLM's name, so that its dashboards work unchanged, or one of ours.

Fed with what the output processor and the scheduler counted; knows nothing of how they count. Recording never raises.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Concatenate, ParamSpec

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from engine_core import FinishReason, SchedulerStats

logger = logging.getLogger(__name__)
P = ParamSpec("P")

# Only one engine lives in this process; dashboards group by the label all the same.
_ENGINE = "0"
_MAX_FIELD_NAMES = 64
_MAX_FIELD_NAME_CHARS = 64

# Source: vLLM, vllm/v1/metrics/loggers.py: dashboards add up buckets of many servers, so the bounds must be equal.
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_GAP_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
_REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)


@dataclass(frozen=True, slots=True)
class _Metric:
    """One row. Counters get ``_total`` appended on the wire; a row with buckets is a histogram."""

    kind: type[Gauge] | type[Counter] | type[Histogram]
    name: str
    help: str
    labels: tuple[str, ...] = ()
    buckets: Sequence[float] = ()


_TABLE = (
    _Metric(Gauge, "vllm:num_requests_running", "Requests that hold KV blocks."),
    _Metric(Gauge, "vllm:num_requests_waiting", "Requests waiting for admission, preempted ones included."),
    _Metric(Gauge, "vllm:kv_cache_usage_perc", "Share of the KV blocks in use; 1 = full."),
    _Metric(Counter, "vllm:prompt_tokens", "Prompt tokens of requests that reached their first token."),
    _Metric(Counter, "vllm:generation_tokens", "Tokens generated."),
    _Metric(Counter, "vllm:num_preemptions", "Times a running request lost its blocks to another."),
    _Metric(Counter, "vllm:prefix_cache_queries", "Prompt tokens looked up in the prefix cache."),
    _Metric(Counter, "vllm:prefix_cache_hits", "Prompt tokens found in the prefix cache."),
    _Metric(Counter, "vllm:request_success", "Requests ended, by reason.", ("finished_reason",)),
    _Metric(Histogram, "vllm:time_to_first_token_seconds", "From arrival to the first token.", (), _FIRST_TOKEN_S),
    _Metric(Histogram, "vllm:inter_token_latency_seconds", "Between a request's outputs.", (), _TOKEN_GAP_S),
    _Metric(Histogram, "vllm:e2e_request_latency_seconds", "From arrival to the end.", (), _REQUEST_S),
    _Metric(Histogram, "vllm:iteration_tokens_total", "Tokens of one engine step, prompt and output.", (), _TOKENS),
    _Metric(Counter, "vllm:spec_decode_num_draft_tokens", "Draft tokens scheduled."),
    _Metric(Counter, "vllm:spec_decode_num_accepted_tokens", "Draft tokens that the model agreed with."),
    _Metric(
        Counter,
        "vllm:spec_decode_num_accepted_tokens_per_pos",
        "The same by the draft's place among those of its step, from 0.",
        ("position",),
    ),
    _Metric(Gauge, "pointsman:num_requests_parked", "Preempted requests whose last output is still under way."),
    _Metric(Counter, "pointsman:prompt_tokens_scheduled", "Prompt tokens handed out, those computed again included."),
    _Metric(Counter, "pointsman:resumed_prefix_cache_queries", "Tokens looked up when preempted requests came back."),
    _Metric(Counter, "pointsman:resumed_prefix_cache_hits", "Of those, found: what the preemption did not cost."),
    _Metric(Counter, "pointsman:num_stalls", "Steps that gave nobody a token although requests were running."),
    _Metric(Counter, "pointsman:schedule_time_seconds", "Time spent deciding what the steps compute."),
    _Metric(Counter, "pointsman:update_time_seconds", "Time spent taking in what the steps computed."),
    _Metric(Counter, "pointsman:unknown_fields", "Request fields that were ignored, by name.", ("field",)),
)


@dataclass(slots=True)
class RequestRecord:
    """One request's figures, from its registration to its end. Times are seconds on the engine's clock.

    Attributes:
        request_id: Whose.
        arrival_time: When it was admitted by the server.
        num_prompt_tokens: Of its prompt.
        num_cached_tokens: Of those, found in the prefix cache.
        num_output_tokens: Sampled so far and counted to the client.
        max_tokens: Output tokens that it may have at most.
        n: Choices that its client asked for; each is a request.
        first_scheduled_time: When the scheduler first admitted it; None before.
        first_token_time: When its first token was delivered; None before.
        last_token_time: When its latest token was delivered; None before.
        end_time: When it ended; None before.
        finish_reason: Why; None before.
    """

    request_id: str
    arrival_time: float
    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    max_tokens: int = 0
    n: int = 1
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    end_time: float | None = None
    finish_reason: FinishReason | None = None


@dataclass(slots=True)
class StepRecord:
    """What one step meant to its requests, as the output processor saw it.

    Attributes:
        num_generation_tokens: Tokens that came.
        started: Requests whose first token came.
        token_gap_s: Per other request with new tokens: seconds since its last ones.
        ended: Requests that ended.
    """

    num_generation_tokens: int = 0
    started: list[RequestRecord] = field(default_factory=list)
    token_gap_s: list[float] = field(default_factory=list)
    ended: list[RequestRecord] = field(default_factory=list)


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


class ServerMetrics:
    """The metrics of one server, in a registry of their own.

    Args:
        model_name: The ``model_name`` label: the name under which the model is served.
    """

    def __init__(self, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._has_failed = False
        self._field_names: set[str] = set()
        self._num_iteration_tokens = 0
        self._fixed = {"model_name": model_name, "engine": _ENGINE}
        self._gauges: dict[str, Gauge] = {}
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        for row in _TABLE:
            self._create(row)
        for reason in FinishReason:
            self._count_by("vllm:request_success", 0, finished_reason=reason.value)

    @_never_raises
    def record_step(self, record: StepRecord, stats: SchedulerStats | None) -> None:
        """Add one step.

        Args:
            record: What it meant to its requests.
            stats: The scheduler's figures after it; None where it gave none.
        """
        self._counters["vllm:prompt_tokens"].inc(sum(request.num_prompt_tokens for request in record.started))
        self._counters["vllm:generation_tokens"].inc(record.num_generation_tokens)
        self._observe(
            "vllm:time_to_first_token_seconds",
            [request.first_token_time - request.arrival_time for request in record.started if request.first_token_time],
        )
        self._observe("vllm:inter_token_latency_seconds", record.token_gap_s)
        for request in record.ended:
            assert request.end_time is not None and request.finish_reason is not None
            self._observe("vllm:e2e_request_latency_seconds", [request.end_time - request.arrival_time])
            self._count_by("vllm:request_success", 1, finished_reason=request.finish_reason.value)
        if stats is not None:
            self._record_scheduler(stats)

    @_never_raises
    def count_unknown_field(self, name: str) -> None:
        """Count a request field that was ignored. Clients choose the names, so only the first few get a series."""
        name = name[:_MAX_FIELD_NAME_CHARS]
        if name not in self._field_names:
            if len(self._field_names) >= _MAX_FIELD_NAMES:
                name = "(other)"
            else:
                self._field_names.add(name)
        self._count_by("pointsman:unknown_fields", 1, field=name)

    def render(self) -> tuple[bytes, str]:
        """Return the body of /metrics and its content type."""
        return generate_latest(self._registry), CONTENT_TYPE_LATEST

    def _record_scheduler(self, stats: SchedulerStats) -> None:
        self._gauges["vllm:num_requests_running"].set(stats.num_running)
        self._gauges["vllm:num_requests_waiting"].set(stats.num_waiting)
        self._gauges["vllm:kv_cache_usage_perc"].set(stats.kv_cache_usage)
        self._gauges["pointsman:num_requests_parked"].set(stats.num_parked)
        self._counters["vllm:num_preemptions"].inc(stats.num_preempted)
        self._counters["vllm:prefix_cache_queries"].inc(stats.num_prefix_queries)
        self._counters["vllm:prefix_cache_hits"].inc(stats.num_prefix_hits)
        self._counters["vllm:spec_decode_num_draft_tokens"].inc(stats.num_draft_tokens)
        self._counters["vllm:spec_decode_num_accepted_tokens"].inc(sum(stats.num_accepted_tokens))
        for position, num_accepted in enumerate(stats.num_accepted_tokens):
            self._count_by("vllm:spec_decode_num_accepted_tokens_per_pos", num_accepted, position=str(position))
        self._counters["pointsman:prompt_tokens_scheduled"].inc(stats.num_prompt_tokens)
        self._counters["pointsman:resumed_prefix_cache_queries"].inc(stats.num_resumed_queries)
        self._counters["pointsman:resumed_prefix_cache_hits"].inc(stats.num_resumed_hits)
        self._counters["pointsman:num_stalls"].inc(stats.num_stalls)
        self._counters["pointsman:schedule_time_seconds"].inc(stats.schedule_time_s)
        self._counters["pointsman:update_time_seconds"].inc(stats.update_time_s)
        self._record_iteration(stats)

    def _record_iteration(self, stats: SchedulerStats) -> None:
        # Not num_scheduled_tokens: as in vLLM, the token that a prompt's end samples counts, a rejected draft does not.
        self._num_iteration_tokens += stats.num_prompt_tokens + stats.num_generation_tokens
        # Stats without a step bring news, such as an abort's, and perhaps what the step under way was given: that is
        # kept for it. So the histogram's count is the number of steps and its sum misses none of their tokens.
        if stats.step_time_s > 0:
            self._observe("vllm:iteration_tokens_total", [self._num_iteration_tokens])
            self._num_iteration_tokens = 0

    def _create(self, row: _Metric) -> None:
        """Create one metric. Its series exists at once where it can, at 0: rate() would miss its first event."""
        labels = (*self._fixed, *row.labels)
        if row.kind is Gauge:
            self._gauges[row.name] = Gauge(row.name, row.help, labels, registry=self._registry).labels(**self._fixed)
        elif row.kind is Histogram:
            histogram = Histogram(row.name, row.help, labels, buckets=row.buckets, registry=self._registry)
            self._histograms[row.name] = histogram.labels(**self._fixed)
        else:
            counter = Counter(row.name, row.help, labels, registry=self._registry)
            self._counters[row.name] = counter if row.labels else counter.labels(**self._fixed)

    def _count_by(self, name: str, amount: int, **labels: str) -> None:
        self._counters[name].labels(**self._fixed, **labels).inc(amount)

    def _observe(self, name: str, values: Sequence[float]) -> None:
        for value in values:
            self._histograms[name].observe(value)
