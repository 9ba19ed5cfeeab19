"""Static against continuous batching: what short requests wait for long ones (the chapter's 3.1.2)."""

from __future__ import annotations

import random

from engine_core import CacheConfig, SchedulerConfig
from tests.bench.bench_engine import BenchEngine, Job, LoadedModel, Run, build_prompt_source
from tests.bench.bench_report import Figures, Outcome, Table, format_s, quantile
from tests.bench.static_batching import StaticBatching
from tests.bench.svg_plot import Panel, Series, plot

MAX_NUM_SEQS = 8
REGIMES = ("static", "continuous")
_REQUESTS_PER_S = 2.6
_LONG_EVERY = 4


def run_batching(model: LoadedModel, *, is_quick: bool) -> Outcome:
    """Send the same requests to both; three of four are short."""
    jobs = _build_jobs(model, *((10, 40) if is_quick else (48, 160)))
    runs = {regime: _run(model, jobs, regime) for regime in REGIMES}
    figures = {regime: _sum_up(run) for regime, run in runs.items()}
    return Outcome(_build_table(figures), figures, _draw(runs))


def _build_jobs(model: LoadedModel, num_jobs: int, long_tokens: int) -> list[Job]:
    """A batch's worth at once, then one after the other at random intervals."""
    draw, rng = build_prompt_source(model, seed=1), random.Random(1)
    jobs, at_s = [], 0.0
    for i in range(num_jobs):
        at_s += rng.expovariate(_REQUESTS_PER_S) if i >= MAX_NUM_SEQS else 0.0
        is_long = i % _LONG_EVERY == 1
        max_tokens = long_tokens if is_long else rng.randint(4, 24)
        jobs.append(Job("long" if is_long else "short", at_s, draw(rng.randint(16, 64)), max_tokens))
    return jobs


def _run(model: LoadedModel, jobs: list[Job], regime: str) -> Run:
    engine = BenchEngine(
        model,
        cache=CacheConfig(num_blocks=128),
        scheduler=SchedulerConfig(max_num_seqs=MAX_NUM_SEQS),
        extra=[StaticBatching(MAX_NUM_SEQS)] if regime == "static" else [],
    )
    return engine.run(jobs)


def _sum_up(run: Run) -> Figures:
    first = [line.first_token_s for line in run.of("short")]
    end = [line.end_s for line in run.of("short")]
    return {
        "short_first_token_p50_s": quantile(first, 0.5),
        "short_first_token_p99_s": quantile(first, 0.99),
        "short_end_p50_s": quantile(end, 0.5),
        "short_end_p99_s": quantile(end, 0.99),
        "total_s": run.total_s,
        "tokens_per_s": sum(len(line.tokens_s) for line in run.times) / run.total_s,
        "seats_empty_share": 1.0 - run.get_mean_rows() / MAX_NUM_SEQS,
    }


def _build_table(figures: dict[str, Figures]) -> Table:
    header = (
        "batching",
        "short ones: first token p50 / p99, s",
        "short ones: end p50 / p99, s",
        "all done, s",
        "tokens/s",
        "seats empty",
    )
    return Table(header, [_build_row(regime, of) for regime, of in figures.items()])


def _build_row(regime: str, of: Figures) -> list[str]:
    return [
        regime,
        f"{format_s(of['short_first_token_p50_s'])} / {format_s(of['short_first_token_p99_s'])}",
        f"{format_s(of['short_end_p50_s'])} / {format_s(of['short_end_p99_s'])}",
        format_s(of["total_s"]),
        f"{of['tokens_per_s']:.0f}",
        f"{of['seats_empty_share']:.0%}",
    ]


def _draw(runs: dict[str, Run]) -> str:
    series = [
        Series(regime, [(line.job.at_s, line.first_token_s) for line in run.of("short")], style, is_line=False)
        for style, (regime, run) in enumerate(runs.items())
    ]
    panel = Panel("", "arrival of the short request (s)", "wait for its first token (s)", series)
    return plot([panel], description="Wait of short requests for their first token, static and continuous batching")
