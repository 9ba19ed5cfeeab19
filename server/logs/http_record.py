"""HttpRecord: what the log and the traces tell of one HTTP request, all its choices together.

It lies on the connection's ASGI scope, where whoever learns something notes it. Knows no log and no tracer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from starlette.types import Scope

from engine_core import SamplingParams
from server.logs.trace_context import TraceContext
from server.records import RequestRecord

# The ASGI scope's key of the record.
_RECORD = "pointsman.record"


@dataclass(frozen=True, slots=True)
class ErrorNote:
    """How a request was refused or failed.

    Attributes:
        code: What programs test for.
        status: HTTP status of its kind; a stream that has begun has sent 200.
        param: The field at fault.
    """

    code: str
    status: int
    param: str | None = None


@dataclass(frozen=True, slots=True)
class AnswerNote:
    """What a request that was not refused asks of the engine.

    Attributes:
        response_id: What its client sees as ``id``.
        model: The name it is served under.
        is_stream: It is answered by events.
        params: Its first choice's.
        requests: One a choice.
    """

    response_id: str
    model: str
    is_stream: bool
    params: SamplingParams
    requests: tuple[RequestRecord, ...]


@dataclass(slots=True)
class HttpRecord:
    """One HTTP request, from its head to the end of its answer. Times are seconds on the engine's clock.

    Attributes:
        method: As the client wrote it.
        path: Likewise, without the query, which may hold secrets.
        start_time: When its head had been read.
        end_time: When its answer had been sent, or nothing more would be; None before.
        status: Of the answer, None before its head.
        scheme: http or https.
        label: Its X-Request-Id: the client's, or ours.
        key_id: Names the key that it came with; empty = none.
        parent: The trace that it comes from.
        trace_id: Of its own spans, or of its parent where nobody records any; empty = neither.
        error: How it was refused or failed.
        client_disconnected: Its client left before the end.
        answer: What it asks of the engine, where it was not refused.
    """

    method: str
    path: str
    start_time: float
    end_time: float | None = None
    status: int | None = None
    scheme: str = "http"
    label: str = ""
    key_id: str = ""
    parent: TraceContext | None = None
    trace_id: str = ""
    error: ErrorNote | None = None
    client_disconnected: bool = False
    answer: AnswerNote | None = None

    # ------------------------------------------------------------------ figures of all choices together
    @property
    def requests(self) -> tuple[RequestRecord, ...]:
        """What became of its choices; empty where it was refused."""
        return self.answer.requests if self.answer is not None else ()

    @property
    def num_input_tokens(self) -> int:
        """Of its prompts. A prompt counts once, however many choices it has."""
        return sum(each.num_prompt_tokens for each in self._leaders)

    @property
    def num_cached_tokens(self) -> int:
        """Of those, found in the prefix cache."""
        return sum(each.num_cached_tokens for each in self._leaders)

    @property
    def num_output_tokens(self) -> int:
        """Sampled for all choices."""
        return sum(each.num_output_tokens for each in self.requests)

    @property
    def num_preemptions(self) -> int:
        """Times that any choice's blocks were taken away."""
        return sum(each.num_preemptions for each in self.requests)

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """Each choice's, of those that have one."""
        return tuple(each.finish_reason.value for each in self.requests if each.finish_reason is not None)

    @property
    def arrival_time(self) -> float | None:
        """When it was admitted."""
        return self.requests[0].arrival_time if self.requests else None

    @property
    def first_scheduled_time(self) -> float | None:
        """When the first of its choices was."""
        return min((time for each in self.requests if (time := each.first_scheduled_time) is not None), default=None)

    @property
    def first_token_time(self) -> float | None:
        """When the first token of any choice was delivered."""
        return min((time for each in self.requests if (time := each.first_token_time) is not None), default=None)

    @property
    def last_token_time(self) -> float | None:
        """When the last token of any choice was delivered."""
        return max((time for each in self.requests if (time := each.last_token_time) is not None), default=None)

    @property
    def last_end_time(self) -> float | None:
        """When the last of its choices ended."""
        return max((time for each in self.requests if (time := each.end_time) is not None), default=None)

    @property
    def median_gap_s(self) -> float | None:
        """Of the medians of its choices' gaps between tokens, the middle one."""
        medians = sorted(gap for each in self.requests if (gap := each.gaps.get_median()) is not None)
        return medians[len(medians) // 2] if medians else None

    @property
    def _leaders(self) -> Iterator[RequestRecord]:
        return (each for each in self.requests if each.choice == 0)


def set_http_record(scope: Scope, record: HttpRecord) -> None:
    """Put a request's record where the others find it."""
    scope[_RECORD] = record


def get_http_record(scope: Scope) -> HttpRecord | None:
    """Return the record of a connection's request; None where nobody keeps one."""
    record = scope.get(_RECORD)
    assert record is None or isinstance(record, HttpRecord)
    return record


def note_error(scope: Scope, error: ErrorNote) -> None:
    """Note why the request is refused or has failed; the last reason stands."""
    record = get_http_record(scope)
    if record is not None:
        record.error = error


def note_disconnect(scope: Scope) -> None:
    """Note that the client has left."""
    record = get_http_record(scope)
    if record is not None:
        record.client_disconnected = True


def note_answer(scope: Scope, answer: AnswerNote) -> None:
    """Note that the request was not refused, and what it asks of the engine."""
    record = get_http_record(scope)
    if record is not None:
        record.answer = answer
