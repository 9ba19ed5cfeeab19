"""What the operator reads while a batch runs: one line that overwrites itself, or a line now and then in a log."""

from __future__ import annotations

import time
from collections.abc import Callable

from server.batch.files import BatchInput
from server.batch.runner import BatchTally
from server.startup_report import StartupReport

_TERMINAL_INTERVAL_S = 0.2
_LOG_INTERVAL_S = 10.0


class BatchProgress:
    """Tells how far a batch is.

    Nobody knows how many lines there are before the last one is read, and a file is not read twice just to count them.
    Until then it is told how much of the file has been read.

    Args:
        report: Where to.
        source: What is being read.
        clock: Seconds.
    """

    def __init__(
        self, report: StartupReport, source: BatchInput, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._report = report
        self._source = source
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
        total = f"/{self._source.num_lines:,}" if self._source.is_at_end else ""
        failed = f", {tally.num_failed:,} failed" if tally.num_failed else ""
        rate = tally.num_output_tokens / elapsed_s
        tokens = f"{tally.num_output_tokens:,} tokens, {rate:,.1f} tokens/s"
        return f"{tally.num_lines:,}{total} lines{failed}{self._format_share()}, {tokens}"

    def _format_share(self) -> str:
        share = None if self._source.is_at_end else self._source.get_share_read()
        return "" if share is None else f", {share:.0%} of the input read"
