"""The last warnings and errors of the log, for the status page. Logged from any thread; knows no page."""

from __future__ import annotations

import logging
from collections import deque
from typing import NamedTuple

MAX_ERRORS = 20
_MAX_CHARS = 500


class LoggedError(NamedTuple):
    """One of them.

    Attributes:
        unix_time: Seconds since 1970.
        level: warning, error or critical.
        text: Its first line; what a client sent may be part of it.
    """

    unix_time: float
    level: str
    text: str


class ErrorLog(logging.Handler):
    """Keeps the last MAX_ERRORS messages of level warning or above; to be added to the root logger."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._errors: deque[LoggedError] = deque(maxlen=MAX_ERRORS)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep one message; without its traceback, which the log itself has."""
        try:
            text = record.getMessage()
        except Exception:  # its arguments do not fit it, which the log's own handler says
            text = str(record.msg)
        line = text.partition("\n")[0][:_MAX_CHARS]
        self._errors.append(LoggedError(record.created, record.levelname.lower(), line))

    def list_errors(self) -> list[LoggedError]:
        """Return them, the latest first."""
        return list(self._errors)[::-1]
