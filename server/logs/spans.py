"""The spans of one HTTP request, described: the server's, and inside it the model's. Pure; knows no tracing library.

Source: OpenTelemetry's semantic conventions for HTTP servers and for generative AI; vLLM's names for latencies. Never
a word of prompts or answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from engine_core import SamplingParams
from server.logs.http_record import AnswerNote, HttpRecord
from server.records import RequestRecord

Attribute = str | int | float | bool | Sequence[str]

_PROVIDER = "pointsman"
_CHAT_SUFFIX = "/chat/completions"
# A request may have hundreds of choices: the events of the first few are enough to see how they went.
_MAX_CHOICES_TOLD = 16


@dataclass(frozen=True, slots=True)
class SpanEvent:
    """A moment in a span.

    Attributes:
        name: What happened.
        time: Seconds on the engine's clock.
        attributes: More about it.
    """

    name: str
    time: float
    attributes: Mapping[str, Attribute]


@dataclass(frozen=True, slots=True)
class SpanDescription:
    """A span.

    Attributes:
        name: What its like are grouped by.
        start: Seconds on the engine's clock.
        end: Likewise.
        attributes: By conventional name.
        events: In order of time.
        failure: The code of what went wrong on our side; None = nothing did.
    """

    name: str
    start: float
    end: float
    attributes: Mapping[str, Attribute]
    events: Sequence[SpanEvent] = ()
    failure: str | None = None


def describe_http(record: HttpRecord) -> SpanDescription:
    """Return the span of a request as HTTP sees it, from its head to the last byte of its answer.

    Args:
        record: Of a request that has ended.
    """
    assert record.end_time is not None and record.status is not None, "it has ended"
    error = record.error
    attributes: dict[str, Attribute] = {
        "http.request.method": record.method,
        "url.path": record.path,
        "url.scheme": record.scheme,
        "http.route": record.path,
        "http.response.status_code": record.status,
    }
    if record.label:
        attributes["http.request.header.x-request-id"] = [record.label]
    if record.key_id:
        attributes["pointsman.key_id"] = record.key_id
    if record.client_disconnected:
        attributes["pointsman.client_disconnected"] = True
    if error is not None:
        attributes["error.type"] = error.code
    return SpanDescription(
        name=f"{record.method} {record.path}",
        start=record.start_time,
        end=record.end_time,
        attributes=attributes,
        failure=error.code if error is not None and error.status >= 500 else None,
    )


def describe_model(record: HttpRecord) -> SpanDescription | None:
    """Return the span of what the model did for a request; None where it was refused before.

    Args:
        record: Of a request that has ended.
    """
    answer, start = record.answer, record.arrival_time
    if answer is None or start is None:
        return None
    end = record.last_end_time or record.end_time
    assert end is not None, "it has ended"
    operation = "chat" if record.path.endswith(_CHAT_SUFFIX) else "text_completion"
    attributes: dict[str, Attribute] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": _PROVIDER,
        **_describe_request(answer),
        **_describe_response(record, answer),
        **_describe_latency(record, start, end),
    }
    error = record.error
    if error is not None:
        attributes["error.type"] = error.code
    return SpanDescription(
        name=f"{operation} {answer.model}",
        start=start,
        end=end,
        attributes=attributes,
        events=_list_events(answer.requests[:_MAX_CHOICES_TOLD]),
        failure=error.code if error is not None and error.status >= 500 else None,
    )


def _describe_request(answer: AnswerNote) -> dict[str, Attribute]:
    params: SamplingParams = answer.params
    first = answer.requests[0]
    attributes: dict[str, Attribute] = {
        "gen_ai.request.id": answer.response_id,
        "gen_ai.request.model": answer.model,
        "gen_ai.request.max_tokens": first.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.seed": params.seed,
        "gen_ai.request.choice.count": first.n,
        "gen_ai.request.stream": answer.is_stream,
    }
    if params.top_k:
        attributes["gen_ai.request.top_k"] = params.top_k
    return attributes


def _describe_response(record: HttpRecord, answer: AnswerNote) -> dict[str, Attribute]:
    attributes: dict[str, Attribute] = {
        "gen_ai.response.id": answer.response_id,
        "gen_ai.response.model": answer.model,
        "gen_ai.response.finish_reasons": record.finish_reasons,
        "gen_ai.usage.input_tokens": record.num_input_tokens,
        "gen_ai.usage.output_tokens": record.num_output_tokens,
        "gen_ai.usage.cache_read.input_tokens": record.num_cached_tokens,
        "pointsman.preemptions": record.num_preemptions,
    }
    first = record.first_token_time
    if answer.is_stream and first is not None and record.arrival_time is not None:
        attributes["gen_ai.response.time_to_first_chunk"] = first - record.arrival_time
    return attributes


def _describe_latency(record: HttpRecord, arrival: float, end: float) -> dict[str, Attribute]:
    scheduled, first, last = record.first_scheduled_time, record.first_token_time, record.last_token_time
    spans = {
        "time_in_queue": (arrival, scheduled),
        "time_to_first_token": (arrival, first),
        "e2e": (arrival, end),
        "time_in_model_prefill": (scheduled, first),
        "time_in_model_decode": (first, last),
        "time_in_model_inference": (scheduled, last),
    }
    return {
        f"gen_ai.latency.{name}": until - since
        for name, (since, until) in spans.items()
        if since is not None and until is not None
    }


def _list_events(requests: Sequence[RequestRecord]) -> list[SpanEvent]:
    """Return what happened to each choice, in order of time. Choices are told apart where there are several."""
    events = []
    for index, request in enumerate(requests):
        which: dict[str, Attribute] = {"pointsman.choice": index} if len(requests) > 1 else {}
        reason = request.finish_reason.value if request.finish_reason is not None else "unfinished"
        moments: list[tuple[str, float | None, dict[str, Attribute]]] = [
            ("queued", request.arrival_time, which),
            ("scheduled", request.first_scheduled_time, which),
            ("first_token", request.first_token_time, which),
            *(("preempted", time, which) for time in request.preempted_times),
            ("finished", request.end_time, {**which, "gen_ai.response.finish_reason": reason}),
        ]
        events += [SpanEvent(name, time, attributes) for name, time, attributes in moments if time is not None]
    return sorted(events, key=lambda event: event.time)
