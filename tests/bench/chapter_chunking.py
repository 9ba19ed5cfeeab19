"""Chunked prefill off and on: what running streams feel when long prompts arrive (the chapter's 3.4)."""

from __future__ import annotations

from itertools import pairwise

from engine_core import CacheConfig, SchedulerConfig
from tests.bench.bench_engine import BenchEngine, Job, LoadedModel, Run, build_prompt_source
from tests.bench.bench_report import Figures, Outcome, Table, format_ms, format_s, quantile
from tests.bench.svg_plot import Panel, Series, plot

MAX_MODEL_LEN = 2048
REGIMES = {
    "off: whole prompts": SchedulerConfig(max_num_batched_tokens=MAX_MODEL_LEN, enable_chunked_prefill=False),
    "on, 512 tokens a step": SchedulerConfig(max_num_batched_tokens=512),
    "on, 128 tokens a step": SchedulerConfig(max_num_batched_tokens=128),
}
_NUM_STREAMS, _STREAM_PROMPT_TOKENS = 4, 64
_LONG_OUTPUT_TOKENS = 8
# A prompt of 1,900 tokens alone takes two cores over two seconds: more often, and the queue would only grow.
_FIRST_LONG_S, _LONG_EVERY_S = 1.0, 4.0


def run_chunking(model: LoadedModel, *, is_quick: bool) -> Outcome:
    """Let streams decode while long prompts come one after the other."""
    jobs = _build_jobs(model, *((1, 900) if is_quick else (5, 1900)))
    runs = {regime: _run(model, jobs, config) for regime, config in REGIMES.items()}
    figures = {regime: _sum_up(run) for regime, run in runs.items()}
    return Outcome(_build_table(figures), figures, _draw(runs))


def _build_jobs(model: LoadedModel, num_long: int, long_prompt_tokens: int) -> list[Job]:
    draw = build_prompt_source(model, seed=2)
    streams = [
        Job("stream", 0.0, draw(_STREAM_PROMPT_TOKENS), MAX_MODEL_LEN - _STREAM_PROMPT_TOKENS)
        for _ in range(_NUM_STREAMS)
    ]
    longs = [
        Job("long", _FIRST_LONG_S + i * _LONG_EVERY_S, draw(long_prompt_tokens), _LONG_OUTPUT_TOKENS)
        for i in range(num_long)
    ]
    return streams + longs


def _run(model: LoadedModel, jobs: list[Job], config: SchedulerConfig) -> Run:
    cache = CacheConfig(num_blocks=320)
    engine = BenchEngine(model, cache=cache, scheduler=config, max_model_len=MAX_MODEL_LEN)
    return engine.run(jobs, background="stream")


def _list_gaps(run: Run) -> list[tuple[float, float]]:
    """Every stream's gaps that end while long prompts are about: (end, length) in seconds, by end."""
    last_s = max(line.tokens_s[-1] for line in run.of("long"))
    gaps = [(after, after - before) for line in run.of("stream") for before, after in pairwise(line.tokens_s)]
    return sorted(gap for gap in gaps if _FIRST_LONG_S <= gap[0] <= last_s)


def _sum_up(run: Run) -> Figures:
    gaps = [length for _, length in _list_gaps(run)]
    first = [line.first_token_s for line in run.of("long")]
    return {
        "gap_p50_s": quantile(gaps, 0.5),
        "gap_p99_s": quantile(gaps, 0.99),
        "gap_max_s": max(gaps),
        "long_first_token_p50_s": quantile(first, 0.5),
        "long_first_token_max_s": max(first),
    }


def _build_table(figures: dict[str, Figures]) -> Table:
    header = (
        "chunked prefill",
        "streams: gap p50, ms",
        "gap p99, ms",
        "longest gap, ms",
        "long prompts: first token p50 / max, s",
    )
    rows = [
        [
            regime,
            format_ms(of["gap_p50_s"]),
            format_ms(of["gap_p99_s"]),
            format_ms(of["gap_max_s"]),
            f"{format_s(of['long_first_token_p50_s'])} / {format_s(of['long_first_token_max_s'])}",
        ]
        for regime, of in figures.items()
    ]
    return Table(header, rows)


def _draw(runs: dict[str, Run]) -> str:
    series = [
        Series(regime, _trace_gaps(run), style, has_marks=False) for style, (regime, run) in enumerate(runs.items())
    ]
    panel = Panel("", "time (s)", "gap between a stream's tokens (ms)", series, is_log=True)
    return plot([panel], description="Gaps between the tokens of running streams while long prompts arrive")


def _trace_gaps(run: Run) -> list[tuple[float, float]]:
    """Every gap as a level as long as it lasts. All streams get their tokens in the same steps: one stands for all."""
    gaps = _list_gaps(run)[::_NUM_STREAMS]
    return [point for end, length in gaps for point in ((end - length, length * 1e3), (end, length * 1e3))]
