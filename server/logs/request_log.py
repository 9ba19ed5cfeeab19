"""One line in the log for each HTTP request that ends, refused ones too, from the record that its spans come from.

Requests for generation are logged at info, those that the server failed as warnings; all others are for debugging.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from server.generation import GENERATING_PATHS
from server.logs.http_record import HttpRecord
from server.logs.log_event import LogEvent
from server.logs.tracing import Tracer

logger = logging.getLogger("server.requests")

# Clients choose paths and methods, and names of fields.
_MAX_WORD_CHARS = 200


class RequestLog:
    """Tells the log of each request, and the tracer of those for generation.

    Args:
        tracer: Records their spans; None = nobody does.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer
        self._has_failed = False

    def end(self, record: HttpRecord) -> None:
        """Tell of a request that has ended. Never raises: it must not cost a client its answer."""
        try:
            is_generation = record.path.removesuffix("\n") in GENERATING_PATHS
            if is_generation and self._tracer is not None:
                record.trace_id = self._tracer.record(record)
            elif record.parent is not None:
                record.trace_id = record.parent.trace_id
            logger.log(_choose_level(record, is_generation=is_generation), RequestEnd(record))
        except Exception:
            if not self._has_failed:
                logger.exception("a request has ended that could not be told of; more like it are not mentioned")
            self._has_failed = True


class RequestEnd(LogEvent):
    """The end of one HTTP request."""

    def __init__(self, record: HttpRecord) -> None:
        self._record = record

    @property
    def title(self) -> str:
        """``POST /v1/completions 200``."""
        record = self._record
        return f"{record.method[:_MAX_WORD_CHARS]} {record.path[:_MAX_WORD_CHARS]} {record.status}"

    @property
    def fields(self) -> Mapping[str, object]:
        """Every field for every request; null where it has none. Times are seconds."""
        record, answer, error = self._record, self._record.answer, self._record.error
        return {
            "request_id": answer.response_id if answer is not None else None,
            "x_request_id": record.label or None,
            "trace_id": record.trace_id or None,
            "key_id": record.key_id or None,
            "method": record.method[:_MAX_WORD_CHARS],
            "path": record.path[:_MAX_WORD_CHARS],
            "status": record.status,
            "error_code": error.code if error is not None else None,
            "error_param": error.param[:_MAX_WORD_CHARS] if error is not None and error.param else None,
            "model": answer.model if answer is not None else None,
            "stream": answer.is_stream if answer is not None else None,
            "n": len(record.requests) or None,
            "finish_reason": join_reasons(record),
            "input_tokens": record.num_input_tokens,
            "cached_tokens": record.num_cached_tokens,
            "output_tokens": record.num_output_tokens,
            "queue_s": _round(_subtract(record.first_scheduled_time, record.arrival_time)),
            "ttft_s": _round(_subtract(record.first_token_time, record.arrival_time)),
            "itl_p50_s": _round(record.median_gap_s),
            "e2e_s": _round(_subtract(record.end_time, record.start_time)),
            "preemptions": record.num_preemptions,
            "client_disconnected": record.client_disconnected,
        }

    def __str__(self) -> str:
        """``POST /v1/completions 200 stop: 12 prompt tokens (8 cached), 5 output tokens; queue 0.003 s, ...``.

        A time that the request did not come to is a dash.
        """
        record = self._record
        ids = [each for each in (record.answer.response_id if record.answer else "", record.key_id) if each]
        names = ", ".join([*ids, f"X-Request-Id {record.label}"] if record.label else ids)
        parts = [f"{self.title} {_describe_end(record)}", _describe_times(record), names]
        return "; ".join(part for part in parts if part)


def join_reasons(record: HttpRecord) -> str | None:
    """Return why the choices ended: one word where all have the same reason, None where none has any."""
    return ",".join(dict.fromkeys(record.finish_reasons)) or None


def _choose_level(record: HttpRecord, *, is_generation: bool) -> int:
    # Who never came in is told of by access/refusals.py now and then: strangers must not fill the log.
    if not is_generation or (record.error is not None and record.error.status in (401, 403, 421)):
        return logging.DEBUG
    return logging.WARNING if record.error is not None and record.error.status == 500 else logging.INFO


def _describe_end(record: HttpRecord) -> str:
    words = [record.error.code if record.error is not None else join_reasons(record) or "ended"]
    if record.client_disconnected:
        words.append("(client left)")
    if not record.requests:
        return " ".join(words)
    if len(record.requests) > 1:
        words.append(f"({len(record.requests)} choices)")
    counts = (
        f"{record.num_input_tokens} prompt tokens ({record.num_cached_tokens} cached), "
        f"{record.num_output_tokens} output tokens"
    )
    preempted = f", preempted {record.num_preemptions} times" if record.num_preemptions else ""
    return f"{' '.join(words)}: {counts}{preempted}"


def _describe_times(record: HttpRecord) -> str:
    total = ("total", _subtract(record.end_time, record.start_time))
    if not record.requests:
        times = [total]
    else:
        arrival = record.arrival_time
        times = [
            ("queue", _subtract(record.first_scheduled_time, arrival)),
            ("first token", _subtract(record.first_token_time, arrival)),
            ("gap", record.median_gap_s),
            total,
        ]
    return ", ".join(f"{name} -" if time is None else f"{name} {time:.3f} s" for name, time in times)


def _subtract(time: float | None, start: float | None) -> float | None:
    return None if time is None or start is None else time - start


def _round(time_s: float | None) -> float | None:
    return None if time_s is None else round(time_s, 6)
