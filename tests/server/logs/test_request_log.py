from __future__ import annotations

import json
import logging

import pytest

from engine_core import FinishReason
from server.logs.http_record import ErrorNote, HttpRecord
from server.logs.log_format import JsonFormatter
from server.logs.request_log import RequestEnd, RequestLog
from server.logs.trace_context import TraceContext
from tests.server.http_records import create_answer, create_http_record
from tests.server.metric_samples import create_record

REFUSED = HttpRecord(
    "POST",
    "/v1/completions",
    100.0,
    end_time=100.001,
    status=400,
    label="abc",
    error=ErrorNote("context_length_exceeded", 400, "prompt"),
)
PARENT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", True)


class FakeTracer:
    def __init__(self, fails: bool = False) -> None:
        self.seen: list[HttpRecord] = []
        self._fails = fails

    def record(self, record: HttpRecord) -> str:
        self.seen.append(record)
        if self._fails:
            raise ZeroDivisionError
        return "f" * 32

    def close(self) -> None:
        """Nothing is open."""


def tell(record: HttpRecord, caplog: pytest.LogCaptureFixture, tracer: FakeTracer | None = None) -> list[str]:
    """The levels and messages that a request's end brings."""
    with caplog.at_level(logging.DEBUG, logger="server.requests"):
        RequestLog(tracer).end(record)
    return [f"{each.levelname} {each.getMessage()}" for each in caplog.records]


def test_a_line_tells_what_a_request_was_and_how_long_it_took(caplog: pytest.LogCaptureFixture) -> None:
    assert tell(create_http_record(), caplog) == [
        "INFO POST /v1/chat/completions 200 stop: 12 prompt tokens (8 cached), 4 output tokens; "
        "queue 0.500 s, first token 1.500 s, gap 0.250 s, total 2.750 s; chatcmpl-1, X-Request-Id abc-1"
    ]


def test_the_fields_tell_the_same_to_programs() -> None:
    assert RequestEnd(create_http_record(key_id="k1", trace_id=PARENT.trace_id)).fields == {
        "request_id": "chatcmpl-1",
        "x_request_id": "abc-1",
        "trace_id": PARENT.trace_id,
        "key_id": "k1",
        "method": "POST",
        "path": "/v1/chat/completions",
        "status": 200,
        "error_code": None,
        "error_param": None,
        "model": "tiny",
        "stream": True,
        "n": 1,
        "finish_reason": "stop",
        "input_tokens": 12,
        "cached_tokens": 8,
        "output_tokens": 4,
        "queue_s": 0.5,
        "ttft_s": 1.5,
        "itl_p50_s": 0.25,
        "e2e_s": 2.75,
        "preemptions": 0,
        "client_disconnected": False,
    }


def test_a_refused_request_is_told_with_its_reason(caplog: pytest.LogCaptureFixture) -> None:
    assert tell(REFUSED, caplog) == [
        "INFO POST /v1/completions 400 context_length_exceeded; total 0.001 s; X-Request-Id abc"
    ]
    fields = RequestEnd(REFUSED).fields
    assert (fields["status"], fields["error_code"], fields["error_param"]) == (400, "context_length_exceeded", "prompt")
    assert (fields["request_id"], fields["model"], fields["finish_reason"], fields["ttft_s"]) == (None,) * 4
    assert set(fields) == set(RequestEnd(create_http_record()).fields), "every request has every field"


def test_who_left_is_told_and_what_a_request_did_not_come_to_is_a_dash(caplog: pytest.LogCaptureFixture) -> None:
    left = create_record(
        finish_reason=FinishReason.ABORT, num_output_tokens=0, first_token_time=None, first_scheduled_time=None
    )
    record = create_http_record(answer=create_answer(left), client_disconnected=True, label="")
    assert tell(record, caplog) == [
        "INFO POST /v1/chat/completions 200 abort (client left): 12 prompt tokens (8 cached), 0 output tokens; "
        "queue -, first token -, gap -, total 2.750 s; chatcmpl-1"
    ]
    assert RequestEnd(record).fields["client_disconnected"] is True


def test_several_choices_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    choices = [
        create_record(n=3, choice=0, num_preemptions=2),
        create_record(n=3, choice=1, finish_reason=FinishReason.LENGTH),
        create_record(n=3, choice=2),
    ]
    record = create_http_record(answer=create_answer(*choices))
    (line,) = tell(record, caplog)
    assert " 200 stop,length (3 choices): 12 prompt tokens (8 cached), 12 output tokens, preempted 2 times; " in line
    assert (RequestEnd(record).fields["n"], RequestEnd(record).fields["finish_reason"]) == (3, "stop,length")


@pytest.mark.parametrize(
    ("error", "level"),
    [
        (None, "INFO"),
        (ErrorNote("invalid_value", 400), "INFO"),
        (ErrorNote("not_ready", 503), "INFO"),
        (ErrorNote("invalid_api_key", 401), "DEBUG"),
        (ErrorNote("internal_error", 500), "WARNING"),
    ],
)
def test_what_the_server_failed_is_a_warning_and_who_has_no_key_no_line(
    error: ErrorNote | None, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    (line,) = tell(create_http_record(error=error), caplog)
    assert line.startswith(level)


def test_other_paths_are_for_debugging_and_have_no_spans(caplog: pytest.LogCaptureFixture) -> None:
    tracer = FakeTracer()
    record = HttpRecord("GET", "/v1/models", 1.0, end_time=1.5, status=200)
    assert tell(record, caplog, tracer) == ["DEBUG GET /v1/models 200 ended; total 0.500 s"]
    assert tracer.seen == []


def test_the_trace_is_the_tracers_else_the_clients(caplog: pytest.LogCaptureFixture) -> None:
    traced, told = create_http_record(parent=PARENT), create_http_record(parent=PARENT)
    tracer = FakeTracer()
    tell(traced, caplog, tracer)
    tell(told, caplog)
    assert tracer.seen == [traced]
    assert (traced.trace_id, told.trace_id) == ("f" * 32, PARENT.trace_id)


def test_it_never_raises_into_serving_and_complains_once(caplog: pytest.LogCaptureFixture) -> None:
    log = RequestLog(FakeTracer(fails=True))
    for _ in range(3):
        log.end(create_http_record())
    assert [each.levelname for each in caplog.records] == ["ERROR"]


def test_what_a_client_wrote_stays_inside_the_line_and_short() -> None:
    evil = 'x" } \n{"level":"info"}\x1b[31m\u2028'
    record = HttpRecord(evil, "/" + "a" * 5000, 1.0, end_time=2.0, status=404, error=ErrorNote("c", 400, evil * 99))
    logged = logging.LogRecord("server.requests", logging.INFO, "", 0, RequestEnd(record), None, None)
    line = JsonFormatter().format(logged)
    assert len(line) < 2500 and line.isprintable()
    told = json.loads(line)
    assert told["method"] == evil and len(told["path"]) == 200 and len(told["error_param"]) == 200
