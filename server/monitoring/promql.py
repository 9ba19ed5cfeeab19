"""Queries as text, in which nothing can be named that no server shows.

Not a parser: it finds the series in a query and where they stand, which is all that has to be checked and filled in.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from server.metric_row import MetricRow
from server.monitoring.series import LABELS, find_series, own_labels

_TOKEN = re.compile(
    r"\b(?:by|without|on|ignoring|group_left|group_right)\s*\((?P<grouping>[^)]*)\)"
    r'|(?P<name>[A-Za-z_][\w:]*)(?:\{(?P<matchers>(?:"[^"]*"|[^}"])*)\})?(?P<range>\[[^\]]+\])?'
    r'|\d[\w.]*|"[^"]*"|(?P<open>\()|(?P<close>\))'
)
_MATCHER = re.compile(r"([A-Za-z_]\w*)\s*(?:=~|!~|!=|=)")

_AGGREGATIONS = frozenset({"sum", "avg", "min", "max", "count"})
_KEYWORDS = frozenset({"and", "or", "unless", "offset", "bool", "group_left", "group_right"})
_OF_COUNTERS = frozenset({"rate", "increase"})
_OF_GAUGES = frozenset({"avg_over_time", "min_over_time", "max_over_time", "deriv", "changes"})
_OTHERS = frozenset({"histogram_quantile", "vector"})
_WORDS = _AGGREGATIONS | _KEYWORDS | _OF_COUNTERS | _OF_GAUGES | _OTHERS


class QueryError(ValueError):
    """A query that would not mean what it says."""


@dataclass(frozen=True, slots=True)
class Query:
    """A query ready to be asked.

    Attributes:
        text: In PromQL.
        selectors: Every series in it, without its range: each must exist for the query to mean anything.
        rows: Of these series, each once, in order.
    """

    text: str
    selectors: tuple[str, ...]
    rows: tuple[MetricRow, ...]


def build_query(text: str, scope: Callable[[MetricRow], str]) -> Query:
    """Check a query and narrow each series in it.

    Args:
        text: In PromQL, its selectors with no matchers but those of the metric's own labels.
        scope: The matchers that a metric's selectors get, such as ``job="x"``.

    Raises:
        UnknownSeriesError: It names a metric that is no row.
        QueryError: It names a label that the metric has not, or takes the rate of a gauge.
    """
    selectors: list[str] = []
    rows: dict[str, MetricRow] = {}
    parts: list[str] = []
    callers: list[str] = []  # of the parentheses that are open: the word before each
    word, end = "", 0
    for token in _TOKEN.finditer(text):
        parts.append(text[end : token.start()])
        end = token.end()
        part, name = token[0], token["name"]
        if token["grouping"] is not None:
            _check_labels(re.findall(r"\w+", token["grouping"]), LABELS, part)
        elif token["open"]:
            callers.append(word)
        elif token["close"]:
            callers.pop()
        elif name is not None and name not in _WORDS:
            row = _check_series(token, callers[-1] if callers else "")
            selector = f"{name}{{{', '.join(filter(None, (token['matchers'], scope(row))))}}}"
            selectors.append(selector)
            rows[row.name] = row
            part = selector + (token["range"] or "")
        word = name if name in _WORDS else ""
        parts.append(part)
    parts.append(text[end:])
    return Query("".join(parts), tuple(dict.fromkeys(selectors)), tuple(rows.values()))


def _check_series(token: re.Match[str], caller: str) -> MetricRow:
    """Return the row of the series at a token, which stands inside the parentheses of ``caller``."""
    series = find_series(token["name"])
    _check_labels(_MATCHER.findall(re.sub(r'"[^"]*"', "", token["matchers"] or "")), own_labels(series.row), token[0])
    functions = _OF_COUNTERS if series.kind == "counter" else _OF_GAUGES
    if series.kind == "counter" and caller not in functions:
        raise QueryError(f"{token[0]} is a counter: take its rate or its increase")
    if (token["range"] is not None) != (caller in functions):
        raise QueryError(f"{token[0]} is a {series.kind} and stands inside {caller or 'nothing'}()")
    return series.row


def _check_labels(names: list[str], known: frozenset[str], where: str) -> None:
    if unknown := sorted(set(names) - known):
        raise QueryError(f"{where}: there is no label {', '.join(unknown)} there")
