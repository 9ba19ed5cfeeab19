"""Priority classes under load: fcfs against the priority policy in an overload (the chapter's 3.8.1)."""

from __future__ import annotations

import random
from collections.abc import Callable

from engine_core import CacheConfig, SchedulerConfig
from tests.bench.bench_engine import BenchEngine, Job, JobTimes, LoadedModel, Run, build_prompt_source
from tests.bench.bench_report import Figures, Outcome, Table, format_s, quantile
from tests.bench.svg_plot import Panel, Series, plot

POLICIES = ("fcfs", "priority")
CLASSES = ("low", "high")
_MAX_NUM_SEQS = 8
_REQUESTS_PER_S = 6.0  # somewhat more than two cores can serve
_HIGH_EVERY, _HIGH_PRIORITY = 10, 1
_PROMPT_TOKENS, _OUTPUT_TOKENS = 64, 32


def run_priority(model: LoadedModel, *, is_quick: bool) -> Outcome:
    """Send the same overload under both policies; one request in ten is urgent."""
    jobs = _build_jobs(model, 20 if is_quick else 100)
    runs = {policy: _run(model, jobs, policy) for policy in POLICIES}
    figures = {f"{policy}, {name}": _sum_up(run.of(name)) for policy, run in runs.items() for name in CLASSES}
    return Outcome(_build_table(figures), figures, _draw(runs))


def _build_jobs(model: LoadedModel, num_jobs: int) -> list[Job]:
    draw, rng = build_prompt_source(model, seed=4), random.Random(4)
    jobs, at_s = [], 0.0
    for i in range(num_jobs):
        is_high = i % _HIGH_EVERY == _HIGH_EVERY - 1
        name, priority = ("high", _HIGH_PRIORITY) if is_high else ("low", 0)
        jobs.append(Job(name, at_s, draw(_PROMPT_TOKENS), _OUTPUT_TOKENS, priority))
        at_s += rng.expovariate(_REQUESTS_PER_S)
    return jobs


def _run(model: LoadedModel, jobs: list[Job], policy: str) -> Run:
    config = SchedulerConfig(max_num_seqs=_MAX_NUM_SEQS, policy=policy)
    return BenchEngine(model, cache=CacheConfig(num_blocks=128), scheduler=config).run(jobs)


def _sum_up(lines: list[JobTimes]) -> Figures:
    gets: dict[str, Callable[[JobTimes], float]] = {
        "queue": lambda line: line.queue_s,
        "first_token": lambda line: line.first_token_s,
        "end": lambda line: line.end_s,
    }
    figures = {
        f"{name}_p{percent}_s": quantile([get(line) for line in lines], percent / 100)
        for name, get in gets.items()
        for percent in (50, 90)
    }
    return {**figures, "num_preempted": sum(line.num_preemptions for line in lines)}


def _build_table(figures: dict[str, Figures]) -> Table:
    header = ("policy, class", "queue p50 / p90, s", "first token p50 / p90, s", "end p50 / p90, s", "preemptions")
    rows = []
    for regime, of in figures.items():
        cells = [
            f"{format_s(of[f'{n}_p50_s'])} / {format_s(of[f'{n}_p90_s'])}" for n in ("queue", "first_token", "end")
        ]
        rows.append([regime, *cells, f"{of['num_preempted']:.0f}"])
    return Table(header, rows)


def _draw(runs: dict[str, Run]) -> str:
    longest = max(line.first_token_s for run in runs.values() for line in run.times)
    panels = [
        Panel(policy, "arrival (s)", "wait for the first token (s)", _build_series(run), y_max=longest)
        for policy, run in runs.items()
    ]
    return plot(panels, description="Wait for the first token of low and high priority requests under both policies")


def _build_series(run: Run) -> list[Series]:
    return [
        Series(f"{name} priority", [(line.job.at_s, line.first_token_s) for line in run.of(name)], style, is_line=False)
        for style, name in ((1, "low"), (0, "high"))
    ]
