"""Where the log's lines go: a thread writes them, so that nobody who logs ever waits for whoever reads.

A reader that stops reading, a full disk, a pipe without an end: lines are lost, counted, and told of as soon as one
gets through again. Knows no formats.
"""

from __future__ import annotations

import logging
import os
import select
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import NoReturn, Protocol, TextIO

# Lines that wait for the reader hold so much memory together.
MAX_WAITING_BYTES = 4 * 2**20
# The end of the process waits so long for a reader that may never read again.
_FLUSH_S = 0.5


class TextOut(Protocol):
    """What of a text stream is needed to write to the operator."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> object: ...

    def isatty(self) -> bool: ...


class LogOutput:
    """A bounded queue of text, and the thread that writes it.

    Args:
        write: Writes all of it, or raises OSError; called on the thread, and may take for ever.
        describe_loss: Returns the line that tells of so many lost ones.
        max_bytes: Text that waits may hold so much; more is lost.
    """

    def __init__(
        self, write: Callable[[bytes], object], describe_loss: Callable[[int], str], max_bytes: int = MAX_WAITING_BYTES
    ) -> None:
        self._write = write
        self._describe_loss = describe_loss
        self._max_bytes = max_bytes
        # A finaliser may log, and so come here, while its own thread holds the lock.
        self._lock = threading.RLock()
        self._num_waiting_bytes = 0
        self._num_lost = 0
        # May be put to from anywhere, a finaliser in the middle of another `put` included.
        self._queue: SimpleQueue[bytes | threading.Event] = SimpleQueue()
        # A daemon thread: one that hangs in a write must not keep the process alive.
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def put(self, text: str) -> None:
        """Have text written, whole lines at a time. Never waits, never raises."""
        data = text.encode(errors="replace")
        num_bytes = len(data)  # not within the lock: nothing in there may be interrupted half-way by a finaliser
        with self._lock:
            if self._num_waiting_bytes + num_bytes > self._max_bytes:
                self._num_lost += 1
                return
            self._num_waiting_bytes += num_bytes
        self._queue.put(data)

    def count_loss(self) -> None:
        """Note a line that could not even be made."""
        with self._lock:
            self._num_lost += 1

    def flush(self, timeout_s: float = _FLUSH_S) -> bool:
        """Wait until everything so far has been written, but not for long. Returns whether it was."""
        mark = threading.Event()
        self._queue.put(mark)
        return mark.wait(timeout_s)

    # ------------------------------------------------------------------ the thread
    def _run(self) -> None:
        while True:
            item = self._queue.get()
            if isinstance(item, threading.Event):
                item.set()
                continue
            has_got_through, num_bytes = self._try_write(item), len(item)
            with self._lock:
                self._num_waiting_bytes -= num_bytes
            if has_got_through:
                self._tell_loss()

    def _try_write(self, data: bytes) -> bool:
        try:
            self._write(data)
        except (OSError, ValueError):  # ValueError: the stream has been closed
            self.count_loss()
            return False
        return True

    def _tell_loss(self) -> None:
        with self._lock:
            num_lost, self._num_lost = self._num_lost, 0
        if num_lost and not self._try_write(f"{self._describe_loss(num_lost)}\n".encode()):
            with self._lock:
                self._num_lost += num_lost - 1  # the line that tells of them is no loss of its own


class LogOutputHandler(logging.Handler):
    """logging's end of a LogOutput. A record is made a line at once, by whoever logs it: what it shows may change."""

    def __init__(self, output: LogOutput) -> None:
        super().__init__()
        self._output = output

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a record's line; one that cannot be made is a lost one."""
        try:
            self._output.put(self.format(record) + "\n")
        except Exception:
            self._output.count_loss()

    def flush(self) -> None:
        """Wait a moment for what is queued; called by logging when the process ends."""
        self._output.flush()


class QueuedText:
    """A stream for the operator's eyes, its text written by the same thread and in the same order as the log's lines.

    Args:
        output: Takes the text.
        is_terminal: Whether somebody looks at it.
    """

    def __init__(self, output: LogOutput, *, is_terminal: bool) -> None:
        self._output = output
        self._is_terminal = is_terminal

    def write(self, text: str, /) -> None:
        """Queue text."""
        self._output.put(text)

    def flush(self) -> None:
        """Do nothing: nobody waits here."""

    def isatty(self) -> bool:
        """Tell whether text may overwrite itself."""
        return self._is_terminal


class StreamWriter:
    """Writes bytes to a stream's file, past the stream: its lock, held in a write that hangs, would block the end.

    Args:
        stream: Such as standard error. One without a file is written to itself.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._is_torn = False
        try:
            self._fd = stream.fileno()
        except (OSError, ValueError):
            self._fd = -1

    def __call__(self, data: bytes) -> None:
        """Write all of it.

        Raises:
            OSError: It could not be written, or only a part of it; the next line starts afresh then.
        """
        if self._fd < 0:
            self._stream.write(data.decode())
            self._stream.flush()
            return
        rest = memoryview(b"\n" + data if self._is_torn else data)
        num_bytes = len(rest)
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:  # somebody else has made it non-blocking
                select.select([], [self._fd], [])
            except OSError:
                self._is_torn |= len(rest) < num_bytes
                raise
        self._is_torn = False


def flush_log() -> None:
    """Wait a moment until what has been logged is written."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def exit_process(code: int) -> NoReturn:
    """End the process without cleaning up, but for what has been logged."""
    flush_log()
    os._exit(code)
