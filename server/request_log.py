"""One line a request in the log, when it ends: from the same record as the counters, so that the two agree."""

from __future__ import annotations

import logging

from server.records import RequestRecord

logger = logging.getLogger("server.requests")


def log_request_end(record: RequestRecord) -> None:
    """Log a request that has ended. It must not cost a client its answer, so it never raises."""
    try:
        logger.info("%s", format_request(record))
    except Exception:
        logger.exception("request %s has ended, but not in words", record.request_id)


def format_request(record: RequestRecord) -> str:
    """Return the line: ``cmpl-1 stop: 12 prompt tokens (8 cached), 5 output tokens; queue 0.003 s, ...``.

    A time that the request did not come to is a dash.
    """
    reason = record.finish_reason.value if record.finish_reason is not None else "unfinished"
    times = (
        ("queue", record.first_scheduled_time),
        ("first token", record.first_token_time),
        ("total", record.end_time),
    )
    told = ", ".join(f"{name} {_format_since(record.arrival_time, time)}" for name, time in times)
    return (
        f"{record.request_id} {reason}: {record.num_prompt_tokens} prompt tokens ({record.num_cached_tokens} cached), "
        f"{record.num_output_tokens} output tokens; {told}"
    )


def _format_since(start: float, time: float | None) -> str:
    return "-" if time is None else f"{time - start:.3f} s"
