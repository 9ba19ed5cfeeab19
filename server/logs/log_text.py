"""Log lines that nobody can forge: whatever a record holds, it is one record to whoever reads the log."""

from __future__ import annotations

import logging
import re

# What ends a line, moves the cursor, colours the terminal or turns the reading direction: control characters, line and
# paragraph separators, bidirectional and invisible marks, lone surrogates.
_UNSAFE = re.compile(
    "[\x00-\x1f\x7f-\x9f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff"
    "\U000e0000-\U000e007f]"
)
_SHORT = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
_INDENT = "    "


def escape_text(text: str) -> str:
    """Return a text with its unsafe characters written as escapes, on one line."""
    return _UNSAFE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    character = match[0]
    code = ord(character)
    if character in _SHORT:
        return _SHORT[character]
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


class SafeFormatter(logging.Formatter):
    """Formats records as logging does, each message on one line, and tracebacks indented below their record.

    A line that begins at the margin is a record of ours, then, whatever a client put into a field or an exception.
    """

    def format(self, record: logging.LogRecord) -> str:
        if record.exc_info:
            record.exc_text = None  # logging keeps there what another formatter made of the traceback
        return super().format(record)

    def formatMessage(self, record: logging.LogRecord) -> str:
        return escape_text(super().formatMessage(record).rstrip("\n"))

    def formatException(self, ei: logging._SysExcInfoType) -> str:
        return _indent(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:
        return _indent(super().formatStack(stack_info))


def _indent(text: str) -> str:
    # Not splitlines(): its other line ends are to be escaped.
    return "\n".join(_INDENT + escape_text(line) for line in text.split("\n"))
