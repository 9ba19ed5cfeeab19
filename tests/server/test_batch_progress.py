from __future__ import annotations

import io
from pathlib import Path

import pytest

from server.batch.files import BatchInput
from server.batch.progress import BatchProgress
from server.batch.runner import BatchTally
from server.startup_report import StartupReport


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def open_input(folder: Path, num_lines: int) -> BatchInput:
    path = folder / "in.jsonl"
    path.write_text("{}\n" * num_lines)
    return BatchInput(str(path))


@pytest.mark.parametrize(
    ("out", "expected"),
    [
        (io.StringIO(), "4/1,000 lines, 40 tokens, 4.0 tokens/s\n"),
        (Terminal(), "\r\x1b[K4/1,000 lines, 40 tokens, 4.0 tokens/s"),
    ],
)
def test_progress_overwrites_itself_on_a_terminal_and_is_rare_in_a_log(
    tmp_path: Path, out: io.StringIO, expected: str
) -> None:
    times = iter([0.0, 0.1, 0.1, 10.0, 10.0, 10.1])
    with open_input(tmp_path, 1000) as source:
        assert len(list(source)) == 1000
        progress = BatchProgress(StartupReport(out), source, clock=lambda: next(times))
        progress.show(BatchTally(1))  # too early, at 0.1 s
        next(times)
        progress.show(BatchTally(4, 0, 40))
        progress.show(BatchTally(5))  # too early again
    assert out.getvalue() == expected


def test_until_the_end_is_read_progress_tells_the_share_of_the_input(tmp_path: Path) -> None:
    out = io.StringIO()
    with open_input(tmp_path, 8) as source:
        lines = iter(source)
        progress = BatchProgress(StartupReport(out), source, clock=iter([0.0, 20.0, 20.0, 40.0]).__next__)
        for _ in range(6):
            next(lines)
        progress.show(BatchTally(3, 1, 10))
        assert list(lines) == [b"{}\n"] * 2
        progress.end(BatchTally(8, 1, 20))
    assert out.getvalue().splitlines() == [
        "3 lines, 1 failed, 75% of the input read, 10 tokens, 0.5 tokens/s",
        "8/8 lines, 1 failed, 20 tokens, 0.5 tokens/s",
    ]


def test_an_input_without_a_size_has_no_share() -> None:
    out = io.StringIO()
    with BatchInput("/dev/zero", max_line_bytes=8) as source:
        BatchProgress(StartupReport(out), source, clock=iter([0.0, 2.0]).__next__).end(BatchTally(3, 1, 10))
    assert out.getvalue() == "3 lines, 1 failed, 10 tokens, 5.0 tokens/s\n"
