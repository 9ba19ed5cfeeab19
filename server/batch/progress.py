"""What the operator reads while a batch runs: one line that overwrites itself, or a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Callable

from server.batch.runner import BatchTally
from server.startup_report import StartupReport

_TERMINAL_INTERVAL_S = 0.2
_LOG_INTERVAL_S = 10.0


class BatchProgress:
    """Tells how far a batch is.

    Args:
        report: Where to.
        num_lines: Of the whole batch; None where nobody knows.
        clock: Seconds.
    """

    def __init__(
        self, report: StartupReport, num_lines: int | None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._report = report
        self._num_lines = num_lines
        self._clock = clock
        self._interval_s = _TERMINAL_INTERVAL_S if report.is_terminal else _LOG_INTERVAL_S
        self._start_s = self._last_s = clock()

    def show(self, tally: BatchTally) -> None:
        """Show how far it is, unless that was shown a moment ago."""
        now_s = self._clock()
        if now_s - self._last_s < self._interval_s:
            return
        self._last_s = now_s
        if self._report.is_terminal:
            self._report.overwrite(self._format(tally))
        else:
            self._report.line(self._format(tally))

    def end(self, tally: BatchTally) -> None:
        """Show where it ended."""
        if self._report.is_terminal:
            self._report.overwrite("")
        self._report.line(self._format(tally))

    def _format(self, tally: BatchTally) -> str:
        elapsed_s = max(self._clock() - self._start_s, 1e-9)
        total = f"/{self._num_lines:,}" if self._num_lines is not None else ""
        failed = f", {tally.num_failed:,} failed" if tally.num_failed else ""
        rate = tally.num_output_tokens / elapsed_s
        return f"{tally.num_lines:,}{total} lines{failed}, {tally.num_output_tokens:,} tokens, {rate:,.1f} tokens/s"
