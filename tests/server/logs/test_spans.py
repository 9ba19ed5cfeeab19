from __future__ import annotations

import dataclasses

from engine_core import FinishReason, SamplingParams
from server.logs.http_record import ErrorNote
from server.logs.spans import describe_http, describe_model
from tests.server.http_records import create_answer, create_http_record
from tests.server.metric_samples import create_record


def test_the_servers_span_is_the_whole_request() -> None:
    span = describe_http(create_http_record(key_id="k1", scheme="https"))
    assert (span.name, span.start, span.end) == ("POST /v1/chat/completions", 99.75, 102.5)
    assert span.attributes == {
        "http.request.method": "POST",
        "url.path": "/v1/chat/completions",
        "url.scheme": "https",
        "http.route": "/v1/chat/completions",
        "http.response.status_code": 200,
        "http.request.header.x-request-id": ["abc-1"],
        "pointsman.key_id": "k1",
    }
    assert (span.events, span.failure) == ((), None)


def test_the_models_span_follows_the_conventions() -> None:
    span = describe_model(create_http_record())
    assert span is not None
    assert (span.name, span.start, span.end) == ("chat tiny", 100.0, 102.5)
    assert span.attributes == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "pointsman",
        "gen_ai.request.id": "chatcmpl-1",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 40,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.frequency_penalty": 0.0,
        "gen_ai.request.presence_penalty": 0.0,
        "gen_ai.request.seed": 7,
        "gen_ai.request.choice.count": 1,
        "gen_ai.request.stream": True,
        "gen_ai.response.id": "chatcmpl-1",
        "gen_ai.response.model": "tiny",
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.response.time_to_first_chunk": 1.5,
        "gen_ai.usage.input_tokens": 12,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 8,
        "gen_ai.latency.time_in_queue": 0.5,
        "gen_ai.latency.time_to_first_token": 1.5,
        "gen_ai.latency.e2e": 2.5,
        "gen_ai.latency.time_in_model_prefill": 1.0,
        "gen_ai.latency.time_in_model_decode": 0.75,
        "gen_ai.latency.time_in_model_inference": 1.75,
        "pointsman.preemptions": 0,
    }
    assert span.failure is None


def test_a_completion_that_is_no_stream() -> None:
    answer = create_answer(is_stream=False, params=SamplingParams(max_tokens=1, top_k=5))
    span = describe_model(create_http_record(path="/v1/completions", answer=answer))
    assert span is not None and span.name == "text_completion tiny"
    assert span.attributes["gen_ai.operation.name"] == "text_completion"
    assert span.attributes["gen_ai.request.top_k"] == 5
    assert "gen_ai.response.time_to_first_chunk" not in span.attributes, "there was one chunk only"


def test_what_happened_is_told_in_order() -> None:
    request = create_record(num_preemptions=2, preempted_times=[101.6, 101.9])
    span = describe_model(create_http_record(answer=create_answer(request)))
    assert span is not None
    assert [(event.name, event.time) for event in span.events] == [
        ("queued", 100.0),
        ("scheduled", 100.5),
        ("first_token", 101.5),
        ("preempted", 101.6),
        ("preempted", 101.9),
        ("finished", 102.5),
    ]
    assert span.events[-1].attributes == {"gen_ai.response.finish_reason": "stop"}
    assert span.attributes["pointsman.preemptions"] == 2


def test_choices_are_told_apart_and_only_so_many() -> None:
    choices = [create_record(n=20, choice=choice) for choice in range(20)]
    span = describe_model(create_http_record(answer=create_answer(*choices)))
    assert span is not None
    assert len(span.attributes["gen_ai.response.finish_reasons"]) == 20  # type: ignore[arg-type]
    assert {event.attributes["pointsman.choice"] for event in span.events} == set(range(16))
    assert len(span.events) == 4 * 16


def test_a_refused_request_has_the_servers_span_only() -> None:
    error = ErrorNote("context_length_exceeded", 400, "prompt")
    record = create_http_record(answer=None, status=400, error=error)
    assert describe_model(record) is None
    span = describe_http(record)
    assert span.attributes["error.type"] == "context_length_exceeded"
    assert span.failure is None, "the client's mistake is none of the server's"


def test_a_failure_of_ours_fails_both_spans() -> None:
    record = create_http_record(error=ErrorNote("internal_error", 500))
    model = describe_model(record)
    assert model is not None
    assert describe_http(record).failure == model.failure == "internal_error"
    assert model.attributes["error.type"] == "internal_error"


def test_who_left_before_anything_came_has_no_latencies_but_the_whole() -> None:
    request = create_record(
        first_scheduled_time=None,
        first_token_time=None,
        last_token_time=None,
        num_output_tokens=0,
        finish_reason=FinishReason.ABORT,
    )
    record = create_http_record(answer=create_answer(request), client_disconnected=True)
    span = describe_model(record)
    assert span is not None
    latencies = {name for name in span.attributes if name.startswith("gen_ai.latency.")}
    assert latencies == {"gen_ai.latency.e2e"}
    assert [event.name for event in span.events] == ["queued", "finished"]
    assert describe_http(record).attributes["pointsman.client_disconnected"] is True


def test_a_choice_that_never_ended_is_unfinished_and_the_span_ends_with_the_request() -> None:
    request = dataclasses.replace(create_record(), end_time=None, finish_reason=None)
    span = describe_model(create_http_record(answer=create_answer(request), end_time=110.0))
    assert span is not None and span.end == 110.0
    assert "finished" not in [event.name for event in span.events]
