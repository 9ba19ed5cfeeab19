from __future__ import annotations

import io

import pytest

from server.batch.progress import BatchProgress
from server.batch.runner import BatchTally
from server.startup_report import StartupReport


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        (io.StringIO(), "4/1,000 lines, 40 tokens, 4.0 tokens/s\n"),
        (Terminal(), "\r\x1b[K4/1,000 lines, 40 tokens, 4.0 tokens/s"),
    ],
)
def test_progress_overwrites_itself_on_a_terminal_and_is_rare_in_a_log(out: io.StringIO, expected: str) -> None:
    times = iter([0.0, 0.1, 0.1, 10.0, 10.0, 10.1])
    progress = BatchProgress(StartupReport(out), 1000, clock=lambda: next(times))
    progress.show(BatchTally(1))  # too early, at 0.1 s
    next(times)
    progress.show(BatchTally(4, 0, 40))
    progress.show(BatchTally(5))  # too early again
    assert out.getvalue() == expected


def test_progress_tells_failures_and_does_without_a_total() -> None:
    out = io.StringIO()
    BatchProgress(StartupReport(out), None, clock=iter([0.0, 2.0]).__next__).end(BatchTally(3, 1, 10))
    assert out.getvalue() == "3 lines, 1 failed, 10 tokens, 5.0 tokens/s\n"
