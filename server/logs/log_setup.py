"""The log of the process: one formatter and one output for all loggers, ours, the engine's and the libraries'.

Called once, by the command line.
"""

from __future__ import annotations

import logging
import sys
import threading
from types import TracebackType
from typing import TextIO

from server.logs.log_format import JsonFormatter, TextFormatter
from server.logs.log_output import LogOutput, LogOutputHandler, QueuedText, StreamWriter, TextOut

_CHATTY_LOGGERS = ("uvicorn", "httpx", "httpcore", "huggingface_hub", "filelock", "urllib3", "asyncio")
_LOG = logging.getLogger("server.log")
_STARTUP = logging.getLogger("server.startup")


class _ReportLines:
    """The operator's text as records of the log, one a line: what reads the log reads JSON, and nothing else."""

    def write(self, text: str, /) -> None:
        for line in text.splitlines():
            if line.strip():
                _STARTUP.info("%s", line)

    def flush(self) -> None:
        """Do nothing: the log's output writes by itself."""

    def isatty(self) -> bool:
        """Tell that nothing can be overwritten."""
        return False


def set_up_logging(level: str, log_format: str, stream: TextIO) -> TextOut:
    """Log to a stream; libraries only from warnings on, unless all is wanted.

    Does nothing where the process logs already, as logging.basicConfig does.

    Args:
        level: One of config.LOG_LEVELS.
        log_format: One of config.LOG_FORMATS; auto is human on a terminal, else json.
        stream: Standard error.

    Returns:
        Where text for the operator goes, so that it keeps its place among the log's lines.
    """
    root = logging.getLogger()
    if root.handlers:
        return stream
    _set_levels(level)
    is_json = log_format == "json" or (log_format == "auto" and not stream.isatty())
    formatter = JsonFormatter() if is_json else TextFormatter()

    def describe_loss(num_lost: int) -> str:
        text = "%d lines of the log are lost: they could not be written, or not as fast as they came"
        return formatter.format(_LOG.makeRecord(_LOG.name, logging.WARNING, __file__, 0, text, (num_lost,), None))

    output = LogOutput(StreamWriter(stream), describe_loss)
    handler = LogOutputHandler(output)
    handler.setFormatter(formatter)
    root.addHandler(handler)
    for name in _CHATTY_LOGGERS:
        # huggingface_hub comes with an output of its own: its lines would stand there twice, and among JSON as text.
        logging.getLogger(name).handlers.clear()
    if not is_json:
        return QueuedText(output, is_terminal=stream.isatty())
    _log_what_python_prints()
    return _ReportLines()


def _set_levels(level: str) -> None:
    number = logging.getLevelName(level.upper())
    logging.getLogger().setLevel(number)
    # What the operator is to read has never asked for a level.
    _STARTUP.setLevel(logging.INFO)
    if level != "debug":
        for name in _CHATTY_LOGGERS:
            logging.getLogger(name).setLevel(max(logging.WARNING, number))
        # What keeps traces from their collector is told once, by otel_tracer.py.
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)


def _log_what_python_prints() -> None:
    """Have warnings, and exceptions that nobody caught, logged too: as text they would break a log of JSON."""
    logging.captureWarnings(True)

    def log_uncaught(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
        _LOG.critical("uncaught exception", exc_info=(kind, error, traceback))

    def log_uncaught_in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None:
            name = args.thread.name if args.thread is not None else "?"
            _LOG.critical("uncaught exception in thread %s", name, exc_info=args.exc_value)

    sys.excepthook = log_uncaught
    threading.excepthook = log_uncaught_in_thread
