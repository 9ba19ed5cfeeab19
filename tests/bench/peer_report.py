"""What peers did, summed up: medians, a table in markdown, a plot. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tests.bench.bench_report import Table
from tests.bench.svg_plot import Panel, Series, plot

# Cores that neither server nor client used: above this a run says little.
MAX_FOREIGN_CORES = 0.2
_OURS = "pointsman"
_QUANTISED = ("pointsman-int8", "pointsman-int4")
# Loads of which the better of int8 and int4 is compared too.
_QUANTISED_LOADS = ("W1", "W2", "W3")
# In bf16, and as many as the plot has styles.
_FULL_PRECISION = ("pointsman", "vllm", "openvino", "llamacpp")
_PLOTTED_LOADS = ("W1", "W2", "W3", "W4", "W5")
_MIB = 2**20
_NOISY_MARK = "*"

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Metric:
    """A row of the table.

    Attributes:
        label: With the unit.
        load: Of which load; empty = of the start.
        read: A record -> the value, or None where it has none.
        is_more_better: Else less is.
        num_digits: After the point.
    """

    label: str
    load: str
    read: Callable[[Record], float | None]
    is_more_better: bool
    num_digits: int = 0


def _rate(name: str = "output_tokens_per_s") -> Callable[[Record], float | None]:
    return lambda record: record["figures"][name]


def _time(name: str, percentile: str) -> Callable[[Record], float | None]:
    return lambda record: record["figures"][name].get(percentile)


def _beyond_mb(start: Record) -> float | None:
    """Return memory beyond weights and pool; a pool that was not written whole makes it meaningless, often negative."""
    if start.get("pool_bytes") is None or start.get("memory_bytes") is None:
        return None
    beyond = float(start["memory_bytes"] - start["weight_bytes"] - start["pool_bytes"]) / _MIB
    return beyond if beyond > 0 else None


METRICS = (
    Metric("W1 one stream, tokens/s", "W1", _rate(), True, 1),
    Metric("W1 gap p50, ms", "W1", _time("itl_ms", "p50"), False, 1),
    Metric("W2 8 streams, tokens/s", "W2", _rate(), True),
    Metric("W2 first token p50, ms", "W2", _time("ttft_ms", "p50"), False),
    Metric("W3 32 streams, tokens/s", "W3", _rate(), True),
    Metric("W3 gap p99, ms", "W3", _time("itl_ms", "p99"), False),
    Metric("W4 shared prefix, tokens/s", "W4", _rate(), True),
    Metric("W4 first token p50, ms", "W4", _time("ttft_ms", "p50"), False),
    Metric("W5 long prompts arrive: gap p99, ms", "W5", _time("itl_ms", "p99"), False),
    Metric("W5 longest gap, ms", "W5", _time("itl_ms", "max"), False),
    Metric("W5 all tokens/s, prompts too", "W5", _rate("total_tokens_per_s"), True),
    Metric("W5 long prompts' first token p50, ms", "W5", _time("long_ttft_ms", "p50"), False),
    Metric("W6 tiny model, 64 streams, tokens/s", "W6", _rate(), True),
    Metric("Qwen3-0.6B's shape: W1, tokens/s", "Q1", _rate(), True, 1),
    Metric("Qwen3-0.6B's shape: W2, tokens/s", "Q2", _rate(), True, 1),
    Metric("Qwen3-0.6B's shape: W3, tokens/s", "Q3", _rate(), True),
    Metric("start to first token, s", "", lambda start: start.get("ready_s"), False, 1),
    Metric("memory, MiB", "", lambda start: start["memory_bytes"] / _MIB if start.get("memory_bytes") else None, False),
    Metric("memory beyond weights and KV pool, MiB", "", _beyond_mb, False),
)


@dataclass(frozen=True, slots=True)
class Value:
    """A median.

    Attributes:
        number: None = no run ended as it should.
        is_noisy: Every run had foreign cores.
        note: Why there is no number.
    """

    number: float | None
    is_noisy: bool = False
    note: str = "-"


def is_noisy(record: Record) -> bool:
    """Return whether somebody else used the processor."""
    return bool(record.get("foreign_cores", 0.0) > MAX_FOREIGN_CORES)


def is_sound(record: Record) -> bool:
    """Return whether a run gave every request what it asked for."""
    figures = record.get("figures")
    return figures is not None and figures["num_failed"] == 0 and figures["num_wrong_length"] == 0


def find_value(metric: Metric, peer: str, records: Sequence[Record], starts: Sequence[Record]) -> Value:
    """Return a peer's median, over quiet runs where there are any."""
    if not metric.load:
        # Of the embedded model: the others differ in size.
        mine = [start for start in starts if start["peer"] == peer and start["model"] == "smollm2"]
    else:
        mine = [record for record in records if (record["peer"], record["load"]) == (peer, metric.load)]
        if mine and not any(map(is_sound, mine)):
            return Value(None, note=_describe_fault(mine[0]))
        mine = [record for record in mine if is_sound(record)]
    quiet = [record for record in mine if not is_noisy(record)]
    numbers = [number for record in quiet or mine if (number := metric.read(record)) is not None]
    return Value(statistics.median(numbers), not quiet) if numbers else Value(None)


def build_table(records: Sequence[Record], starts: Sequence[Record]) -> Table:
    """Return one row a metric, one column a peer, and how Pointsman compares with the best of the others.

    Args:
        records: One a run: peer, load, repeat, foreign_cores, and figures or error.
        starts: One a start: peer, model, ready_s, memory_bytes, weight_bytes, pool_bytes.
    """
    peers = _find_peers(starts)
    has_others = any(not peer.startswith(_OURS) for peer in peers)
    rows: list[list[str]] = []
    for metric in METRICS:
        values = {peer: find_value(metric, peer, records, starts) for peer in peers}
        if all(value.number is None and value.note == "-" for value in values.values()):
            continue
        cells = [_format(value, metric.num_digits) for value in values.values()]
        rows.append([metric.label, *cells, *([_compare(metric, values)] if has_others else [])])
    return Table(["", *peers, *(["Pointsman to the best"] if has_others else [])], rows)


def describe_faults(records: Sequence[Record]) -> list[str]:
    """Return a sentence for each run that cannot be taken as it is."""
    lines = []
    for record in records:
        name = f"{record['peer']} {record['load']}, round {record['repeat'] + 1}"
        if not is_sound(record):
            lines.append(f"{name}: {_describe_fault(record)}")
        elif is_noisy(record):
            lines.append(f"{name}: others used {record['foreign_cores']:.2f} cores")
    return lines


def build_plot(records: Sequence[Record], starts: Sequence[Record]) -> str | None:
    """Return tokens/s and longest usual gaps by load, of the peers in full precision; None without a run."""
    panels = [
        panel
        for title, label, read in (
            ("tokens/s", "tokens/s, log", _rate()),
            ("gap between tokens, p99", "ms, log", _time("itl_ms", "p99")),
        )
        if (panel := _build_panel(title, label, read, records, starts)).series
    ]
    return (
        plot(panels, description="Tokens per second and gaps of each peer under the loads W1 to W5") if panels else None
    )


def _build_panel(
    title: str, label: str, read: Callable[[Record], float | None], records: Sequence[Record], starts: Sequence[Record]
) -> Panel:
    series = []
    for style, peer in enumerate(_FULL_PRECISION):
        points = []
        for index, load in enumerate(_PLOTTED_LOADS, 1):
            number = find_value(Metric("", load, read, True), peer, records, starts).number
            if number:
                points.append((float(index), number))
        if points:
            series.append(Series(peer, points, style, is_line=False))
    return Panel(title, "load: W1 to W5", label, series, is_log=True, x_max=len(_PLOTTED_LOADS) + 0.4)


def _find_peers(starts: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(start["peer"] for start in starts))


def _compare(metric: Metric, values: dict[str, Value]) -> str:
    """Return Pointsman's ratios: 2.1x is twice as good, whichever way good is.

    In bf16 to the best in bf16; and the better of int8 and int4 to the best of whatever precision.
    """
    ours, quantised = [_OURS], [peer for peer in _QUANTISED if metric.load in _QUANTISED_LOADS]
    others = [peer for peer in values if not peer.startswith(_OURS)]
    ratios = (
        ("", _ratio(metric, values, ours, [peer for peer in others if peer in _FULL_PRECISION])),
        ("quantised ", _ratio(metric, values, quantised, others)),
    )
    return " / ".join(f"{name}{ratio:.2f}x" for name, ratio in ratios if ratio) or "-"


def _ratio(metric: Metric, values: dict[str, Value], ours: Sequence[str], others: Sequence[str]) -> float | None:
    best = max if metric.is_more_better else min
    mine, theirs = ([values[p].number for p in peers if p in values] for peers in (ours, others))
    known_mine, known_theirs = ([number for number in numbers if number] for numbers in (mine, theirs))
    if not known_mine or not known_theirs:
        return None
    ratio = best(known_mine) / best(known_theirs)
    return ratio if metric.is_more_better else 1 / ratio


def _format(value: Value, num_digits: int) -> str:
    if value.number is None:
        return value.note
    return f"{value.number:,.{num_digits}f}{_NOISY_MARK if value.is_noisy else ''}"


def _describe_fault(record: Record) -> str:
    if record.get("error"):
        return str(record["error"]).splitlines()[0]
    figures = record["figures"]
    if figures["num_failed"]:
        return f"{figures['num_failed']} of {figures['num_requests']} failed: {next(iter(figures['errors']), '?')}"
    return f"{figures['num_wrong_length']} answers of another length"
