"""Records of the log as lines: JSON for programs, text for people. Pure. One record is one line, whatever it holds.

Messages, names and exceptions may quote a client: what it wrote can neither begin a line of its own nor steer a
terminal.
"""

from __future__ import annotations

import json
import logging
import re
from datetime import UTC, datetime

from server.log_event import LogEvent

_TEXT_FORMAT = "%(asctime)s %(levelname)-7s %(name)s: "
# A record is logged whole or cut, never as large as what a client managed to have quoted.
_MAX_MESSAGE_CHARS = 8_000
_MAX_EXCEPTION_CHARS = 32_000
# Controls, line separators, marks that turn the direction of text around, lone surrogates.
_ODD = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}
_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=str)
_INDENT = "    "


class JsonFormatter(logging.Formatter):
    """One JSON object a record: ts, level, logger, message, an event's fields, and the exception where there is one."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line, without its end."""
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
            line["exception"] = _cut(self.formatException(record.exc_info), _MAX_EXCEPTION_CHARS)
        if record.stack_info:
            line["stack"] = _cut(record.stack_info, _MAX_EXCEPTION_CHARS)
        # Outside its strings the encoder writes nothing odd, so an escape is always inside one.
        return _ODD.sub(_escape_in_json, _ENCODER.encode(line))


class TextFormatter(logging.Formatter):
    """One line of text a record; an exception follows, indented."""

    def __init__(self) -> None:
        super().__init__(_TEXT_FORMAT)

    def format(self, record: logging.LogRecord) -> str:
        """Return the line or lines, without the last one's end."""
        record.asctime = self.formatTime(record)
        head = escape_controls(self.formatMessage(record).rstrip()) + " "
        lines = [head + escape_controls(_cut(read_message(record), _MAX_MESSAGE_CHARS))]
        for text in (self.formatException(record.exc_info) if record.exc_info else "", record.stack_info or ""):
            lines += [_INDENT + escape_controls(line) for line in _cut(text, _MAX_EXCEPTION_CHARS).split("\n") if line]
        return "\n".join(lines)


def read_message(record: logging.LogRecord) -> str:
    """Return a record's message. One whose arguments do not fit says so: it must not cost its writer an exception."""
    try:
        return record.getMessage()
    except Exception as error:
        return f"{record.msg!r} cannot be shown with its arguments: {type(error).__name__}"


def escape_controls(text: str) -> str:
    """Return text without characters that end a line, steer a terminal or change the direction of reading."""
    return _ODD.sub(_escape_in_text, text)


def _escape_in_text(match: re.Match[str]) -> str:
    character = match[0]
    code = ord(character)
    return _SHORT.get(character) or (rf"\x{code:02x}" if code < 0x100 else rf"\u{code:04x}")


def _escape_in_json(match: re.Match[str]) -> str:
    code = ord(match[0])
    # Half a character is none in JSON either, though the escape would be allowed.
    return r"\ufffd" if 0xD800 <= code <= 0xDFFF else rf"\u{code:04x}"


def _format_time(unix_time: float) -> str:
    return datetime.fromtimestamp(unix_time, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _cut(text: str, max_chars: int) -> str:
    return text if len(text) <= max_chars else f"{text[:max_chars]}... ({len(text) - max_chars} more characters)"
