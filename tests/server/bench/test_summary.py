from __future__ import annotations

import json
import random

import numpy as np
import pytest

from server.bench.load import Load, LoadRun
from server.bench.results import RequestResult
from server.bench.summary import Slo, percentile, percentiles_ms, summarize

LOAD = Load(num_requests=3, prompt_tokens=100, output_tokens=3)


def answer(
    *times: float, error: str | None = None, num_prompt: int | None = 100, num_output: int | None = None
) -> RequestResult:
    return RequestResult(
        start_s=0.0,
        token_times=list(times),
        end_s=max(times, default=0.0),
        num_prompt_tokens=num_prompt,
        num_cached_tokens=None if num_prompt is None else 64,
        num_output_tokens=len(times) if num_output is None else num_output,
        has_usage=num_prompt is not None,
        error=error,
    )


def test_percentiles_are_numpys() -> None:
    rng = random.Random(1)
    for count in (1, 2, 3, 10, 99, 1_000):
        values = sorted(rng.random() for _ in range(count))
        for percent in (0, 1, 50, 90, 95, 99, 100):
            assert percentile(values, percent) == pytest.approx(float(np.percentile(values, percent)))


def test_percentiles_have_names_and_are_milliseconds() -> None:
    assert percentiles_ms([0.3, 0.1, 0.2]) == pytest.approx(
        {"p50": 200.0, "p90": 280.0, "p95": 290.0, "p99": 298.0, "max": 300.0}
    )
    assert percentiles_ms([]) == {}


def test_a_run_is_summed_up() -> None:
    results = [answer(1.0, 1.5, 2.0), answer(2.0, 2.1, 2.2), answer(1.0, error="broken")]
    summary = summarize(LoadRun(results, 4.0), LOAD)
    assert (summary.num_requests, summary.num_failed, summary.num_wrong_length) == (3, 1, 0)
    assert (summary.num_output_tokens, summary.num_prompt_tokens, summary.num_cached_tokens) == (6, 200, 128)
    assert (summary.output_tokens_per_s, summary.requests_per_s) == (1.5, 0.5)
    assert summary.ttft_ms["p50"] == pytest.approx(1_500.0)
    assert summary.itl_ms["max"] == pytest.approx(500.0)
    assert summary.e2e_ms["max"] == pytest.approx(2_200.0)
    assert summary.time_per_token_ms["p50"] == pytest.approx(300.0)
    assert summary.errors == {"broken": 1}
    assert (summary.is_counted_by_server, summary.is_clean, summary.warnings) == (True, False, [])
    assert json.loads(json.dumps(summary.to_json()))["num_output_tokens"] == 6


def test_goodput_counts_the_requests_that_keep_to_both_limits() -> None:
    results = [answer(1.0, 1.5, 2.0), answer(2.0, 2.1, 2.2), answer(1.0, 3.0, 5.0)]
    run = LoadRun(results, 2.0)
    counts = {
        slo: summarize(run, LOAD, slo).goodput_per_s
        for slo in (Slo(), Slo(1_000.0), Slo(None, 500.0), Slo(1_000.0, 500.0), Slo(1.0, 1.0))
    }
    assert counts == {
        Slo(): 1.5,
        Slo(1_000.0): 1.0,
        Slo(None, 500.0): 1.0,
        Slo(1_000.0, 500.0): 0.5,
        Slo(1.0, 1.0): 0.0,
    }
    assert summarize(run, LOAD, Slo(1_000.0)).good_share == pytest.approx(2 / 3)
    assert summarize(run, LOAD).goodput_per_s is None


def test_an_answer_of_another_length_is_told() -> None:
    summary = summarize(LoadRun([answer(1.0, 2.0, 3.0), answer(1.0, 2.0)], 1.0), LOAD)
    assert (summary.num_wrong_length, summary.is_clean) == (1, False)
    assert summary.warnings == ["an answer has 2 tokens instead of 3"]


def test_a_count_of_events_is_told_as_such() -> None:
    summary = summarize(LoadRun([answer(1.0, 2.0, num_prompt=None)], 1.0), LOAD)
    assert summary.warnings == ["an answer has 2 tokens instead of 3 (counted by events: the server sends no usage)"]
    assert (summary.is_counted_by_server, summary.num_prompt_tokens) == (False, None)


def test_events_that_hold_more_than_one_token_are_no_fault() -> None:
    summary = summarize(LoadRun([answer(1.0, 2.0, num_output=3)], 1.0), LOAD)
    assert (summary.is_clean, summary.num_events, summary.num_output_tokens) == (True, 2, 3)


@pytest.mark.parametrize(("counted", "num_warnings"), [(100, 0), (101, 0), (103, 0), (104, 1), (80, 1)])
def test_prompts_of_another_length_are_told_but_a_token_in_front_is_not(counted: int, num_warnings: int) -> None:
    summary = summarize(LoadRun([answer(1.0, 2.0, 3.0, num_prompt=counted)], 1.0), LOAD)
    assert (len(summary.warnings), summary.is_clean) == (num_warnings, True)


def test_a_run_in_which_all_failed_has_no_percentiles() -> None:
    summary = summarize(LoadRun([answer(error="refused"), answer()], 1.0), LOAD, Slo(1.0))
    assert (summary.ttft_ms, summary.itl_ms, summary.num_failed, summary.goodput_per_s) == ({}, {}, 2, 0.0)
    assert summary.errors == {"refused": 1, "the answer holds no token": 1}
