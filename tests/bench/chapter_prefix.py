"""Prefix hits against admission and preemption, in a crowded KV pool (the chapter's 3.5 and 3.6)."""

from __future__ import annotations

from collections.abc import Callable

from engine_core import CacheConfig, SchedulerConfig
from tests.bench.bench_engine import BenchEngine, Job, LoadedModel, Run, build_prompt_source
from tests.bench.bench_report import Figures, Outcome, Table, format_s, quantile
from tests.bench.svg_plot import Panel, Series, plot

SHARED_PERCENT = (0, 25, 50, 75, 90)
# Four prompts that share nothing fill the pool; each request then grows by two blocks.
_BLOCK_SIZE, _NUM_BLOCKS, _MAX_NUM_SEQS = 32, 84, 8
_PROMPT_TOKENS = 640
_START_S = 1.5


def run_prefix(model: LoadedModel, *, is_quick: bool) -> Outcome:
    """Let all requests come at once, sharing the first part of their prompts, which has been computed before."""
    shares = (0, 90) if is_quick else SHARED_PERCENT
    jobs_of = (6, 32) if is_quick else (16, 64)
    runs = {share: _run(model, share, *jobs_of) for share in shares}
    figures = {f"{share} %": _sum_up(run) for share, run in runs.items()}
    return Outcome(_build_table(figures), figures, _draw(list(figures.values())))


def _run(model: LoadedModel, shared_percent: int, num_requests: int, num_tokens: int) -> Run:
    draw = build_prompt_source(model, seed=3)
    stem = draw(_PROMPT_TOKENS * shared_percent // 100)
    jobs = [Job("stem", 0.0, [*stem, 0], max_tokens=1)]
    jobs += [Job("sharer", _START_S, stem + draw(_PROMPT_TOKENS - len(stem)), num_tokens) for _ in range(num_requests)]
    cache = CacheConfig(block_size=_BLOCK_SIZE, num_blocks=_NUM_BLOCKS)
    return BenchEngine(model, cache=cache, scheduler=SchedulerConfig(max_num_seqs=_MAX_NUM_SEQS)).run(jobs)


def _sum_up(run: Run) -> Figures:
    first = [line.first_token_s for line in run.of("sharer")]
    num_stem_tokens = sum(len(line.job.prompt) for line in run.of("stem"))
    num_resumed = run.count("num_resumed_queries")
    return {
        "hit_share": run.count("num_prefix_hits") / (run.count("num_prefix_queries") - num_stem_tokens),
        "first_token_p50_s": quantile(first, 0.5),
        "first_token_max_s": max(first),
        "total_s": run.total_s - _START_S,
        "mean_running": run.get_mean_rows(since_s=_START_S),
        "num_preempted": run.count("num_preempted"),
        "num_recomputed_tokens": num_resumed - run.count("num_resumed_hits"),
        "num_recovered_tokens": run.count("num_resumed_hits"),
    }


def _build_table(figures: dict[str, Figures]) -> Table:
    header = (
        "shared prefix",
        "hit ratio",
        "first token p50 / max, s",
        "all done, s",
        "running at once, mean",
        "preemptions",
        "tokens computed again / found again",
    )
    return Table(header, [_build_row(share, of) for share, of in figures.items()])


def _build_row(share: str, of: Figures) -> list[str]:
    return [
        share,
        f"{of['hit_share']:.0%}",
        f"{format_s(of['first_token_p50_s'])} / {format_s(of['first_token_max_s'])}",
        format_s(of["total_s"]),
        f"{of['mean_running']:.1f}",
        f"{of['num_preempted']:.0f}",
        f"{of['num_recomputed_tokens']:,.0f} / {of['num_recovered_tokens']:,.0f}",
    ]


def _draw(figures: list[Figures]) -> str:
    def panel(title: str, unit: str, get: Callable[[Figures], float]) -> Panel:
        points = [(of["hit_share"] * 100, get(of)) for of in figures]
        return Panel(title, "hit ratio (%)", unit, [Series("prefix hits", points, style=1)], x_max=100)

    panels = [
        panel("First token, median", "seconds", lambda of: of["first_token_p50_s"]),
        panel("Running at once, mean", "requests", lambda of: of["mean_running"]),
        panel("Preemptions", "count", lambda of: of["num_preempted"]),
    ]
    return plot(panels, height=250, description="Time to first token, requests running and preemptions by hit ratio")
