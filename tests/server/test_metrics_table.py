"""The table's rows among each other, and that they are the metrics which ServerMetrics writes, no more and no fewer."""

from __future__ import annotations

import ast
import functools
import inspect
from collections.abc import Callable, Iterator

import pytest

from engine_core import EnginePhase, EngineState
from server import metrics as metrics_module
from server.engine_gauges import read_engine_gauges
from server.lifecycle.drain import Drain
from server.metric_series import Counter, Gauge, Histogram
from server.metrics import ServerMetrics
from server.metrics_table import TABLE, _build_alias
from server.overload.gate import Gate
from server.overload.limits import Limits
from server.records import StepRecord
from tests.server.fake_engine_client import FakeEngineClient
from tests.server.metric_samples import ROW, STATS, create_record, get_changes


def get_lines(function: Callable[..., object]) -> range:
    lines, first = inspect.getsourcelines(function)
    return range(first, first + len(lines))


# What vLLM once swapped out has no place here: these two are there for whoever asks for them.
ALWAYS_ZERO = {"vllm:num_requests_swapped", "vllm:cpu_cache_usage_perc"}
# Others name these; that each is a gauge of the table, the page tells when it is rendered.
WATCHED = {*get_lines(ServerMetrics._read_watched), *get_lines(ServerMetrics.get_values)}
KINDS = {"_gauge": "gauge", "_counter": "counter", "_histogram": "histogram"}


class SpyingMetrics(ServerMetrics):
    """Keeps the names of what was written."""

    def __init__(self) -> None:
        self.written: set[str] = set()
        super().__init__("tiny")

    def _gauge(self, name: str, *labels: str) -> Gauge:
        self.written.add(name)
        return super()._gauge(name, *labels)

    def _counter(self, name: str, *labels: str) -> Counter:
        self.written.add(name)
        return super()._counter(name, *labels)

    def _histogram(self, name: str, *labels: str) -> Histogram:
        self.written.add(name)
        return super()._histogram(name, *labels)


def find_names() -> Iterator[tuple[str, str]]:
    """Kind and name of every metric that the source of server.metrics asks for."""
    for node in ast.walk(ast.parse(inspect.getsource(metrics_module))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in KINDS:
            name = node.args[0]
            if isinstance(name, ast.Name) and node.lineno in WATCHED:
                continue
            assert isinstance(name, ast.Constant), f"line {node.lineno}: spell the name out, so that it can be found"
            yield KINDS[node.func.attr], name.value


@pytest.mark.parametrize(("kind", "name"), sorted(set(find_names())))
def test_a_name_in_the_recorder_is_a_row_of_that_kind(kind: str, name: str) -> None:
    assert [row.kind for row in TABLE if row.name == name and not row.alias_of] == [kind]


def test_recording_everything_once_writes_every_row() -> None:
    metrics = SpyingMetrics()
    record = StepRecord(1, started=[create_record()], token_gap_s=[0.1], ended=[create_record()])
    metrics.record_step(record, STATS)
    metrics.record_http(method="GET", status="2xx", handler="/", duration_s=0.1)
    metrics.count_unknown_field("field")
    metrics.count_refusal(431)
    metrics.count_access_refusal("no_key")
    metrics.count_rejection("queue_full")
    metrics.count_watchdog_near_miss()
    client = FakeEngineClient()
    metrics.watch(functools.partial(read_engine_gauges, client, Drain()))
    metrics.watch(Gate(engine_client=client, limits=Limits(), metrics=metrics).read_gauges)
    metrics.set_cache_config(EngineState(EnginePhase.READY), cache_dtype="auto", enable_prefix_caching=True)
    metrics.render()
    assert not metrics._has_failed
    rows = {row.name for row in TABLE if not row.alias_of}
    assert metrics.written == rows - ALWAYS_ZERO


def test_an_alias_is_its_row_but_for_what_is_said_of_it() -> None:
    alias = _build_alias("old_total", ROW)
    assert get_changes(ROW, alias) == {
        "name": "old_total",
        "help": "The same as h_total.",
        "tells": "",
        "alias_of": "h_total",
    }


def test_every_alias_of_the_table_has_its_rows_shape() -> None:
    rows = {row.name: row for row in TABLE}
    aliases = [row for row in TABLE if row.alias_of]
    assert aliases
    for alias in aliases:
        assert set(get_changes(rows[alias.alias_of], alias)) <= {"name", "help", "tells", "alias_of"}
