"""Records of the log as lines: JSON for programs, text for people. Pure. One record is one line, whatever it holds.

Messages, names and exceptions may quote a client: what it wrote can neither begin a line of its own nor steer a
terminal.
"""

from __future__ import annotations

import copy
import json
import logging
from datetime import UTC, datetime

from server.json_text import scrub_surrogates
from server.logs.log_event import LogEvent
from server.logs.log_text import SafeFormatter

_TEXT_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: %(message)s"
# A record is logged whole or cut, never as large as what a client managed to have quoted.
_MAX_MESSAGE_CHARS = 8_000
_MAX_EXCEPTION_CHARS = 32_000
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"), default=str)


class JsonFormatter(logging.Formatter):
    """One JSON object a record: ts, level, logger, message, an event's fields, and the exception where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end, in ASCII."""
        event = record.msg if isinstance(record.msg, LogEvent) else None
        line: dict[str, object] = {
            "ts": _format_time(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _cut(event.title if event is not None else read_message(record), _MAX_MESSAGE_CHARS),
        }
        if event is not None:
            line.update(event.fields)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = _cut(record.stack_info, _MAX_EXCEPTION_CHARS)
        # Half a character is none in JSON either, though its escape would be allowed.
        clean = {name: scrub_surrogates(value) if isinstance(value, str) else value for name, value in line.items()}
        return _ENCODER.encode(clean).replace("\x7f", r"\u007f")

    def formatException(self, ei: logging._SysExcInfoType) -> str:
        """Return a traceback, not longer than any log wants it."""
        return _cut(super().formatException(ei), _MAX_EXCEPTION_CHARS)


class TextFormatter(SafeFormatter):
    """One line of text a record; an exception follows, indented."""

    def __init__(self) -> None:
        super().__init__(_TEXT_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        """Return the line or lines, without the last one's end."""
        shown = copy.copy(record)  # what is kept on a record would be shown by others, too
        shown.msg, shown.args, shown.exc_text = _cut(read_message(record), _MAX_MESSAGE_CHARS), None, None
        return super().format(shown)

    def formatException(self, ei: logging._SysExcInfoType) -> str:
        """Return a traceback, not longer than any log wants it."""
        return _cut(super().formatException(ei), _MAX_EXCEPTION_CHARS)


def read_message(record: logging.LogRecord) -> str:
    """Return a record's message. One whose arguments do not fit says so: it must not cost its writer an exception."""
    try:
        return record.getMessage()
    except Exception as error:
        return f"{record.msg!r} cannot be shown with its arguments: {type(error).__name__}"


def _format_time(unix_time: float) -> str:
    return datetime.fromtimestamp(unix_time, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]}... ({len(text) - max_chars} more characters)"
