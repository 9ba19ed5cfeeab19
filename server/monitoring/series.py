"""Which series there are to ask for: the table's, and those that Prometheus and its client add by themselves."""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace

from server.metric_row import Kind, MetricRow, counter, gauge
from server.metrics_table import TABLE

_SUFFIXES = ("_bucket", "_sum", "_count")


class UnknownSeriesError(LookupError):
    """A query names something that no server shows."""


@dataclass(frozen=True, slots=True)
class Series:
    """What a name on the page is.

    Attributes:
        row: Its metric's.
        kind: Of these samples: a histogram's are counters.
    """

    row: MetricRow
    kind: Kind


# Prometheus' own, with the labels that it gives to all.
_UP = gauge("up", "0 or 1", "1 while Prometheus can scrape the server.")
_ALERTS = gauge("ALERTS", "1", "1 for every alert that holds.", labels=("alertname", "alertstate", "severity"))
# prometheus_client's ProcessCollector.
_PROCESS = (
    gauge("process_start_time_seconds", "seconds", "Unix time at which the process started."),
    gauge("process_resident_memory_bytes", "bytes", "Memory of the process that is in RAM, weights and KV included."),
    gauge("process_open_fds", "files", "Open files and sockets."),
    gauge("process_max_fds", "files", "How many of them the system allows."),
    counter("process_cpu_seconds_total", "seconds", "CPU time of all threads."),
)
SCRAPED = tuple(replace(row, has_model_labels=False) for row in (_UP, _ALERTS, *_PROCESS))

_ROWS = {row.name: row for row in (*TABLE, *SCRAPED)}


def find_row(name: str) -> MetricRow:
    """Return a metric's row.

    Raises:
        UnknownSeriesError: There is none.
    """
    if name not in _ROWS:
        near = difflib.get_close_matches(name, _ROWS, 1)
        raise UnknownSeriesError(f"no metric is called {name}" + (f"; is it {near[0]}?" if near else ""))
    return _ROWS[name]


def find_series(name: str) -> Series:
    """Return what a series' name, with a histogram's suffix where it has one, stands for.

    Raises:
        UnknownSeriesError: No server shows it.
    """
    for suffix in _SUFFIXES:
        row = _ROWS.get(name.removesuffix(suffix))
        if name.endswith(suffix) and row is not None and row.kind == "histogram":
            return Series(row, "counter")
    row = find_row(name)
    if row.kind == "histogram":
        raise UnknownSeriesError(f"{name} is a histogram: ask for its _bucket, _sum or _count")
    return Series(row, row.kind)


def own_labels(row: MetricRow) -> frozenset[str]:
    """Return the labels of a row's series, with those that Prometheus adds."""
    labels = {*row.labels, "job", "instance"}
    if row.kind == "histogram":
        labels.add("le")
    if row.has_model_labels:
        labels |= {"model_name", "engine"}
    return frozenset(labels)


LABELS = frozenset[str]().union(*map(own_labels, _ROWS.values()))
