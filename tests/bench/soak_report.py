"""What a soak's samples say: a slope, what was left at idle, what went wrong; as figures, as text, as a plot. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.bench.soak_watch import Sample
from tests.bench.svg_plot import Panel, Series, plot

# Until every KV block, program and allocator arena has been touched.
WARM_UP_SHARE = 1 / 3
# A leak of 1 KB a request at 10 requests a second is 36 MB an hour. Less than so much in all is noise.
MAX_SLOPE_MB_PER_H = 30.0
MAX_GROWTH_MB = 8.0
_KIB_PER_MB = 1e6 / 1024
# The pools may grow for half an hour, a thread whenever all are busy at once: asyncio's to min(32, cores + 4), the
# texts' to 6. More than their sum is a leak.
_TEXT_THREADS = 6


@dataclass(frozen=True, slots=True)
class Soak:
    """A soak that is over.

    Attributes:
        seed: Of its load.
        num_streams: Clients at a time.
        seconds: How long it took.
        samples: All looks.
        ends: How often clients saw which end.
        wrong: What clients saw that they should not have.
        log_errors: Lines of the server's log that tell of errors.
    """

    seed: int
    num_streams: int
    seconds: float
    samples: Sequence[Sample]
    ends: Mapping[str, int]
    wrong: Sequence[str]
    log_errors: Sequence[str]


def fit_slope(points: Sequence[tuple[float, float]]) -> float:
    """Return the slope of the line with the least squares through points (x, y); 0 where they tell none."""
    if len(points) < 2:
        return 0.0
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


def summarize(soak: Soak) -> dict[str, Any]:
    """Return the figures."""
    warm = [sample for sample in soak.samples if sample.seconds >= soak.seconds * WARM_UP_SHARE]
    idle = [sample for sample in soak.samples if sample.is_idle]
    settled = [sample for sample in warm if sample.is_idle] or idle
    # Between requests: what a load holds at the moment is no leak.
    slope = fit_slope([(sample.seconds / 3600, sample.anon_kib / _KIB_PER_MB) for sample in settled])
    slope_loaded = fit_slope([(sample.seconds / 3600, sample.anon_kib / _KIB_PER_MB) for sample in warm])
    last = soak.samples[-1]
    return {
        "seed": soak.seed,
        "streams": soak.num_streams,
        "minutes": round(soak.seconds / 60, 2),
        "requests": sum(soak.ends.values()),
        "ends": dict(soak.ends),
        "generated_tokens": int(last.num_tokens),
        "preemptions": int(last.num_preemptions),
        "anon_mb_first_idle": round(idle[0].anon_kib / _KIB_PER_MB, 1),
        "anon_mb_warm": round(settled[0].anon_kib / _KIB_PER_MB, 1),
        "anon_mb_last": round(settled[-1].anon_kib / _KIB_PER_MB, 1),
        "slope_mb_per_h_idle": round(slope, 2),
        "slope_mb_per_h_loaded": round(slope_loaded, 2),
        "files_idle": [int(each.num_files) for each in idle],
        "threads_idle": [int(each.num_threads) for each in idle],
        "tasks_idle": [int(each.num_tasks) for each in idle],
        "files_max": max(sample.num_files for sample in soak.samples),
        "threads_max": max(sample.num_threads for sample in soak.samples),
        "tasks_max": int(max(sample.num_tasks for sample in soak.samples)),
        "kv_usage_max": round(max(sample.kv_usage for sample in soak.samples), 3),
        "kv_usage_idle_max": max(sample.kv_usage for sample in idle),
        "wrong": len(soak.wrong),
        "log_errors": len(soak.log_errors),
    }


def find_problems(soak: Soak) -> list[str]:
    """Return what a healthy server would not show, in words."""
    figures = summarize(soak)
    problems = [f"a client saw: {text}" for text in soak.wrong[:5]]
    problems += [f"the log says: {text}" for text in soak.log_errors[:5]]
    growth = figures["anon_mb_last"] - figures["anon_mb_warm"]
    if figures["slope_mb_per_h_idle"] > MAX_SLOPE_MB_PER_H and growth > MAX_GROWTH_MB:
        problems.append(f"memory grows by {figures['slope_mb_per_h_idle']} MB an hour")
    if figures["kv_usage_idle_max"] > 0:
        problems.append("KV blocks are held although nothing runs")
    pools = min(32, (os.cpu_count() or 1) + 4) + _TEXT_THREADS
    if figures["threads_idle"][-1] > figures["threads_idle"][0] + pools:
        problems.append(f"threads grow: {figures['threads_idle']}")
    # The first idle look is from before the connections had reason to grow.
    for what in ("files", "tasks"):
        after_first, last = figures[f"{what}_idle"][1:2], figures[f"{what}_idle"][-1]
        if after_first and last > after_first[0] + 2:
            problems.append(f"{what} grow: {figures[f'{what}_idle']}")
    return problems


def format_markdown(soak: Soak) -> str:
    """Return the report for people."""
    figures, problems = summarize(soak), find_problems(soak)
    ends = ", ".join(f"{count:,} {end}" for end, count in sorted(figures["ends"].items()))
    rows = {
        "duration": f"{figures['minutes']:.1f} min, {figures['streams']} clients at a time, seed {figures['seed']}",
        "requests": f"{figures['requests']:,}: {ends}",
        "tokens generated": f"{figures['generated_tokens']:,}",
        "preemptions": f"{figures['preemptions']:,}",
        "KV blocks in use": f"up to {figures['kv_usage_max']:.0%}; between rounds {figures['kv_usage_idle_max']:.0%}",
        "RssAnon + VmSwap": f"{figures['anon_mb_first_idle']:.0f} MB at the start, {figures['anon_mb_warm']:.0f} MB "
        f"warm, {figures['anon_mb_last']:.0f} MB at the end",
        "slope after warming up": f"{figures['slope_mb_per_h_idle']:+.1f} MB/h between rounds, "
        f"{figures['slope_mb_per_h_loaded']:+.1f} MB/h under load",
        "file descriptors": _format_counts(figures, "files"),
        "threads": _format_counts(figures, "threads"),
        "event loop tasks": _format_counts(figures, "tasks"),
        "unexpected answers": str(figures["wrong"]),
        "errors in the log": str(figures["log_errors"]),
    }
    table = ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
    verdict = ["Nothing leaks."] if not problems else ["Problems:", "", *(f"- {problem}" for problem in problems)]
    return "\n".join(["# Soak", "", *table, "", *verdict, ""])


def _format_counts(figures: Mapping[str, Any], what: str) -> str:
    first, *_, last = [*figures[f"{what}_idle"], figures[f"{what}_idle"][-1]]
    return f"{first} at the start, {last} at the end, at most {figures[f'{what}_max']}"


def draw(soak: Soak) -> str:
    """Return the plot: memory, counts, and the load that it all was under."""
    samples, idle = soak.samples, [sample for sample in soak.samples if sample.is_idle]

    def line(name: str, style: int, values: Sequence[float]) -> Series:
        points = [(sample.seconds / 60, value) for sample, value in zip(samples, values, strict=True)]
        return Series(name, points, style, has_marks=False)

    memory = Panel(
        "RssAnon + VmSwap",
        "minutes",
        "MB",
        [
            line("under load", 0, [sample.anon_kib / _KIB_PER_MB for sample in samples]),
            Series("idle", [(each.seconds / 60, each.anon_kib / _KIB_PER_MB) for each in idle], 1, is_line=False),
        ],
    )
    counts = Panel(
        "What is open",
        "minutes",
        "count",
        [
            line("files", 2, [sample.num_files for sample in samples]),
            line("threads", 3, [sample.num_threads for sample in samples]),
            line("tasks", 0, [sample.num_tasks for sample in samples]),
        ],
    )
    load = Panel(
        "The load",
        "minutes",
        "requests; % of KV blocks",
        [
            line("running", 2, [sample.num_running for sample in samples]),
            line("KV, %", 1, [sample.kv_usage * 100 for sample in samples]),
        ],
    )
    return plot([memory, counts, load], width=1140, height=320, description="A soak: memory, open things, load.")
