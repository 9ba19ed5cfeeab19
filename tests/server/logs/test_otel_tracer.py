from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from server.logs.http_record import ErrorNote
from server.logs.otel_tracer import OtelTracer, PatientExporter
from server.logs.trace_context import TraceContext
from tests.server.http_records import create_http_record
from tests.server.otlp_receiver import OtlpReceiver, ReceivedSpan

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
# Kinds and codes as OTLP numbers them.
INTERNAL, SERVER, ERROR = 1, 2, 2
BOOT_S = 1_700_000_000


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES", "OTEL_TRACES_SAMPLER", "OTEL_SDK_DISABLED"):
        monkeypatch.delenv(name, raising=False)


def send(receiver: OtlpReceiver, **overrides: object) -> tuple[str, list[ReceivedSpan]]:
    """One request's trace: its id, and what the collector got of it. The engine's clock began at BOOT_S."""
    tracer = OtelTracer(
        endpoint=receiver.url + "/v1/traces",
        version="1.2.3",
        clock_ns=lambda: 0,
        unix_time_ns=lambda: BOOT_S * 10**9,
    )
    trace_id = tracer.record(create_http_record(**overrides))
    tracer.close()
    return trace_id, sorted(receiver.spans, key=lambda each: each.span.start_time_unix_nano)


def test_a_request_arrives_as_two_spans_one_inside_the_other() -> None:
    with OtlpReceiver() as receiver:
        trace_id, (http, model) = send(receiver)
    assert receiver.paths == ["/v1/traces"]
    assert (http.span.name, http.span.kind) == ("POST /v1/chat/completions", SERVER)
    assert (model.span.name, model.span.kind) == ("chat tiny", INTERNAL)
    assert http.ids[0] == model.ids[0] == trace_id and len(trace_id) == 32
    assert (http.ids[2], model.ids[2]) == ("", http.ids[1])
    assert http.resource["service.name"] == "pointsman" and http.resource["service.version"] == "1.2.3"
    assert model.attributes["gen_ai.usage.output_tokens"] == 4
    assert model.attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert http.attributes["http.request.header.x-request-id"] == ["abc-1"]


def test_times_are_of_the_day_and_events_where_they_belong() -> None:
    with OtlpReceiver() as receiver:
        _, (http, model) = send(receiver)
    ns = 10**9
    assert http.span.start_time_unix_nano == (BOOT_S + 99) * ns + 750_000_000
    assert http.span.end_time_unix_nano == (BOOT_S + 102) * ns + 500_000_000
    assert model.span.start_time_unix_nano == (BOOT_S + 100) * ns
    assert [(event.name, event.time_unix_nano - BOOT_S * ns) for event in model.span.events] == [
        ("queued", 100 * ns),
        ("scheduled", 100_500_000_000),
        ("first_token", 101_500_000_000),
        ("finished", 102_500_000_000),
    ]


def test_a_clients_trace_is_gone_on_with() -> None:
    parent = TraceContext(TRACE, SPAN, True, "vendor=1")
    with OtlpReceiver() as receiver:
        trace_id, (http, model) = send(receiver, parent=parent)
    assert trace_id == TRACE
    assert http.ids[0] == model.ids[0] == TRACE and http.ids[2] == SPAN
    assert http.span.trace_state == "vendor=1"


def test_a_trace_that_its_client_does_not_record_is_not_sent_but_has_its_id() -> None:
    with OtlpReceiver() as receiver:
        trace_id, spans = send(receiver, parent=TraceContext(TRACE, SPAN, False))
    assert (trace_id, spans) == (TRACE, [])


def test_a_refused_request_is_one_span_and_a_failure_is_marked() -> None:
    with OtlpReceiver() as receiver:
        _, (http,) = send(receiver, answer=None, status=400, error=ErrorNote("invalid_value", 400))
        receiver.spans.clear()
        _, failed = send(receiver, error=ErrorNote("internal_error", 500))
    assert http.attributes["error.type"] == "invalid_value" and http.span.status.code != ERROR
    assert [each.span.status.code for each in failed] == [ERROR, ERROR]


def test_the_operators_variables_name_the_service(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-eu")
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "deployment.environment=prod")
    with OtlpReceiver() as receiver:
        _, (http, _) = send(receiver)
    assert (http.resource["service.name"], http.resource["deployment.environment"]) == ("chat-eu", "prod")


def find_closed_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def test_a_dead_collector_costs_nothing_but_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    tracer = OtelTracer(endpoint=f"http://127.0.0.1:{find_closed_port()}/v1/traces", version="1")
    for _ in range(600):
        tracer.record(create_http_record())
    started = time.monotonic()
    tracer.close()
    assert time.monotonic() - started < 4.0
    ours = [each for each in caplog.records if each.name == "server.logs.otel_tracer"]
    assert [each.levelname for each in ours] in (["WARNING"], []), "it may still be trying"


class FakeExporter(SpanExporter):
    """Does what a test says.

    Attributes:
        outcomes: What becomes of the next exports.
        is_held: Its exports wait while it is set.
    """

    def __init__(self, *outcomes: SpanExportResult | Exception) -> None:
        self.outcomes = list(outcomes)
        self.is_free = threading.Event()
        self.is_free.set()
        self.num_spans = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.is_free.wait()
        self.num_spans += len(spans)
        outcome = self.outcomes.pop(0) if self.outcomes else SpanExportResult.SUCCESS
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def shutdown(self) -> None:
        """Nothing is open."""


def test_trouble_is_told_when_it_begins_and_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    good, bad = SpanExportResult.SUCCESS, SpanExportResult.FAILURE
    exporter = PatientExporter(
        FakeExporter(good, bad, OSError("gone"), bad, good, good, bad), "http://c:4318/v1/traces"
    )
    with caplog.at_level(logging.INFO):
        results = [exporter.export([]) for _ in range(7)]
    assert results == [good, bad, bad, bad, good, good, bad]
    told = [each.getMessage() for each in caplog.records]
    assert [text.split(" http://")[0] for text in told] == [
        "traces do not reach",
        "traces reach",
        "traces do not reach",
    ]


def test_a_password_in_the_endpoint_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    tracer = OtelTracer(
        endpoint="http://us:se@cret@c:4318/v1/traces",
        version="1",
        exporter=FakeExporter(SpanExportResult.FAILURE),
    )
    tracer.record(create_http_record())
    tracer.close()
    (told,) = [each.getMessage() for each in caplog.records if "do not reach" in each.getMessage()]
    assert "do not reach http://c:4318/v1/traces (" in told and "cret" not in told


def test_a_collector_that_hangs_costs_spans_and_neither_time_nor_memory() -> None:
    exporter = FakeExporter()
    exporter.is_free.clear()
    tracer = OtelTracer(endpoint="http://c/v1/traces", version="1", exporter=exporter)
    for _ in range(1500):
        tracer.record(create_http_record())
    started = time.monotonic()
    tracer.close()
    assert time.monotonic() - started < 4.0
    exporter.is_free.set()
