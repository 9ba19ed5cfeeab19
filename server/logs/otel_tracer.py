"""OtelTracer: spans through OpenTelemetry's SDK to an OTLP/HTTP collector. Imports what only the extra `otel` brings.

Nobody who serves waits for the collector: a thread of the SDK's sends, spans that it cannot keep up with are dropped.
Besides the endpoint everything is set by OpenTelemetry's own variables: OTEL_SERVICE_NAME, OTEL_TRACES_SAMPLER,
OTEL_EXPORTER_OTLP_HEADERS and the like.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import (
    NonRecordingSpan,
    Span,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    TraceState,
    format_trace_id,
    set_span_in_context,
)

from server.logs.http_record import HttpRecord
from server.logs.spans import SpanDescription, describe_http, describe_model
from server.logs.trace_context import TraceContext

logger = logging.getLogger(__name__)

_NAME = "pointsman"
# Spans that wait for the collector: about 4 KB each.
_MAX_WAITING_SPANS = 2048
_MAX_BATCH = 512
_SEND_EVERY_S = 2.0
# A collector that takes longer gets nothing; the end of the process waits so long for it.
_SEND_TIMEOUT_S = 5.0
_CLOSE_S = 2.0
_NS = 1_000_000_000


class OtelTracer:
    """Sends each request's spans when it has ended.

    Args:
        endpoint: Of an OTLP/HTTP receiver, its path included.
        version: Of Pointsman.
        exporter: Where spans go instead; None = to the endpoint.
        clock_ns: The engine's clock, in nanoseconds.
        unix_time_ns: The time of day.
    """

    def __init__(
        self,
        *,
        endpoint: str,
        version: str,
        exporter: SpanExporter | None = None,
        clock_ns: Callable[[], int] = time.monotonic_ns,
        unix_time_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._clock_ns = clock_ns
        self._unix_time_ns = unix_time_ns
        self._provider = TracerProvider(resource=_build_resource(version), shutdown_on_exit=False)
        inner = exporter or OTLPSpanExporter(endpoint=endpoint, timeout=_SEND_TIMEOUT_S)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                PatientExporter(inner, _without_user(endpoint)),
                max_queue_size=_MAX_WAITING_SPANS,
                schedule_delay_millis=_SEND_EVERY_S * 1000,
                max_export_batch_size=_MAX_BATCH,
            )
        )
        self._tracer = self._provider.get_tracer(_NAME, version)

    def record(self, record: HttpRecord) -> str:
        """Record a request's spans and return their trace's id."""
        # The request's times are on a clock that has no date; one look at both puts them all on the same offset.
        offset_ns = self._unix_time_ns() - self._clock_ns()
        http = self._start(describe_http(record), _build_context(record.parent), SpanKind.SERVER, offset_ns)
        if http.is_recording():
            model = describe_model(record)
            if model is not None:
                span = self._start(model, set_span_in_context(http, Context()), SpanKind.INTERNAL, offset_ns)
                span.end(_to_ns(model.end, offset_ns))
            assert record.end_time is not None
            http.end(_to_ns(record.end_time, offset_ns))
        return format_trace_id(http.get_span_context().trace_id)

    def close(self) -> None:
        """Send what has not been sent, and stop; a collector that does not answer is not waited for."""
        # On a thread: the SDK would wait for as long as its exporter tries again.
        closing = threading.Thread(target=self._provider.shutdown, name="otel-close", daemon=True)
        closing.start()
        closing.join(_CLOSE_S)

    def _start(self, described: SpanDescription, context: Context, kind: SpanKind, offset_ns: int) -> Span:
        span = self._tracer.start_span(
            described.name,
            context=context,
            kind=kind,
            attributes=described.attributes,
            start_time=_to_ns(described.start, offset_ns),
        )
        for event in described.events:
            span.add_event(event.name, event.attributes, _to_ns(event.time, offset_ns))
        if described.failure is not None:
            span.set_status(Status(StatusCode.ERROR, described.failure))
        return span


class PatientExporter(SpanExporter):
    """An exporter whose troubles are told once: when they begin, and when they are over.

    Args:
        inner: Sends, and may fail in any way.
        endpoint: What it sends to, as the log may show it.
    """

    def __init__(self, inner: SpanExporter, endpoint: str) -> None:
        self._inner = inner
        self._endpoint = endpoint
        self._is_failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans. Those that the collector does not take are dropped."""
        reason = "it did not take them"
        try:
            result = self._inner.export(spans)
        except Exception as error:
            result, reason = SpanExportResult.FAILURE, type(error).__name__
        is_failing = result is not SpanExportResult.SUCCESS
        if is_failing and not self._is_failing:
            logger.warning(
                "traces do not reach %s (%s) and are dropped until they do; it must speak OTLP over HTTP, "
                "as port 4318 of a collector usually does",
                self._endpoint,
                reason,
            )
        elif self._is_failing and not is_failing:
            logger.warning("traces reach %s again", self._endpoint)
        self._is_failing = is_failing
        return result

    def shutdown(self) -> None:
        """Stop sending."""
        self._inner.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Tell whether all that was given has been sent."""
        return self._inner.force_flush(timeout_millis)


def _without_user(url: str) -> str:
    """Return a URL without the name and password that may stand before its host."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _build_resource(version: str) -> Resource:
    resource = Resource.create({SERVICE_VERSION: version})
    # The SDK's word for a service whose operator gave it no name.
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: _NAME}))
    return resource


def _build_context(parent: TraceContext | None) -> Context:
    if parent is None:
        return Context()
    remote = SpanContext(
        trace_id=int(parent.trace_id, 16),
        span_id=int(parent.span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(TraceFlags.SAMPLED if parent.is_sampled else TraceFlags.DEFAULT),
        trace_state=TraceState.from_header([parent.state]) if parent.state else None,
    )
    return set_span_in_context(NonRecordingSpan(remote), Context())


def _to_ns(time_s: float, offset_ns: int) -> int:
    return round(time_s * _NS) + offset_ns
