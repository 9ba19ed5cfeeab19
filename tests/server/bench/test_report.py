from __future__ import annotations

import dataclasses
import io
import itertools

import pytest

from server.bench.load import Load, LoadRun
from server.bench.report import LoadProgress, describe_load, format_summary
from server.bench.results import RequestResult
from server.bench.summary import Slo, summarize
from server.startup_report import StartupReport

LOAD = Load(num_requests=4, concurrency=2, prompt_tokens=1_056, prefix_tokens=1_024, output_tokens=2)
GOOD = RequestResult(start_s=0.0, token_times=[1.0, 1.5], end_s=1.5, num_output_tokens=2)
BAD = RequestResult(start_s=0.0, error="the server answered 500")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show(out: io.StringIO, *results: RequestResult) -> str:
    progress = LoadProgress(StartupReport(out), 4, clock=itertools.count(0.0, 10.0).__next__)
    for result in results:
        progress.take(result)
    progress.clear()
    return out.getvalue()


def test_progress_is_a_line_in_a_log() -> None:
    # Looks at the clock: start, then one at each result and one for the rate.
    assert show(io.StringIO(), GOOD, BAD) == ("1/4 requests, 0.1 tokens/s\n2/4 requests, 1 failed, 0.1 tokens/s\n")


def test_progress_overwrites_itself_on_a_terminal_and_goes_away() -> None:
    assert show(Terminal(), GOOD) == "\r\x1b[K1/4 requests, 0.1 tokens/s\r\x1b[K"


def test_progress_is_not_shown_at_every_result() -> None:
    out = io.StringIO()
    progress = LoadProgress(StartupReport(out), 4, clock=itertools.count(0.0, 4.0).__next__)
    for _ in range(4):
        progress.take(GOOD)
    assert out.getvalue() == "3/4 requests, 0.4 tokens/s\n"


@pytest.mark.parametrize(
    ("load", "told"),
    [
        (LOAD, "4 requests, 2 at a time: prompts of 1,056 tokens, the first 1,024 in common, answers of 2"),
        (
            dataclasses.replace(LOAD, rate=2.5, prefix_tokens=0),
            "4 requests, 2.5 a second on average: prompts of 1,056 tokens, answers of 2",
        ),
    ],
)
def test_a_load_in_words(load: Load, told: str) -> None:
    assert describe_load(load) == told


def test_figures_are_a_table_with_goodput_warnings_and_errors_below() -> None:
    slo = Slo(2_000.0, 600.0)
    lines = format_summary(summarize(LoadRun([GOOD, GOOD, GOOD, BAD], 2.0), LOAD, slo), slo).splitlines()
    assert lines[0] == "3 complete, 1 failed in 2.0 s: 3.0 tokens/s, 1.50 requests/s"
    assert lines[1] == "tokens: ? of prompts, 6 of answers, counted by events: the server sends no usage"
    assert lines[2].split() == ["milliseconds", "p50", "p90", "p95", "p99", "max"]
    assert lines[3].split() == ["to", "the", "first", "token", *["1,000.0"] * 5]
    assert lines[4].split() == ["between", "tokens", *["500.0"] * 5]
    assert lines[6].split() == ["to", "the", "end", *["1,500.0"] * 5]
    assert lines[7] == (
        "goodput: 1.50 requests/s, 75% of the requests, had their first token within 2000 ms "
        "and a further one every 600 ms or less on average"
    )
    assert lines[8:] == ["failed 1 times: the server answered 500"]


def test_without_an_answer_there_is_no_table() -> None:
    text = format_summary(summarize(LoadRun([BAD], 2.0), LOAD))
    assert "milliseconds" not in text and text.endswith("failed 1 times: the server answered 500")


def test_one_token_an_answer_leaves_dashes() -> None:
    short = RequestResult(start_s=0.0, token_times=[1.0], end_s=1.0, num_output_tokens=1)
    text = format_summary(summarize(LoadRun([short], 2.0), dataclasses.replace(LOAD, output_tokens=1)))
    assert text.splitlines()[4].split() == ["between", "tokens", *"-----"]
