"""Gauges, counters and histograms as plain numbers, and how they are written in Prometheus' text format.

Not prometheus_client's: its values change into files shared between processes as soon as PROMETHEUS_MULTIPROC_DIR is in
the environment, a histogram's observation costs a walk over all buckets and two locks, and no two names can show one
series. Everything here belongs to one thread.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Generic, Protocol, TypeVar

from prometheus_client.utils import floatToGoString

from server.metric_row import MetricRow

RATE_WINDOW_S = 10
# Control characters and separators, at which some readers split lines, and surrogates, which UTF-8 has not. The format
# knows an escape for the newline only, and Prometheus refuses a page with another one.
_UNPRINTABLE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


class Gauge:
    """A number that follows something. Never negative: nothing measured here can be."""

    __slots__ = ("_value",)

    def __init__(self) -> None:
        self._value = 0.0

    def set(self, value: float) -> None:
        """Take the present value."""
        self._value = max(0.0, value)

    def samples(self) -> Iterator[tuple[str, str, float]]:
        """Yield what the page shows: the name's suffix, a label of the sample's own, the value."""
        yield "", "", self._value


class Counter:
    """A sum that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1) -> None:
        """Add ``amount``.

        Raises:
            ValueError: It is negative.
        """
        if amount < 0:
            raise ValueError(f"a counter cannot go down by {-amount}")
        self.value += amount

    def samples(self) -> Iterator[tuple[str, str, float]]:
        """Yield what the page shows; see Gauge."""
        yield "", "", self.value


class Histogram:
    """How many observations lay in which bucket, and their sum.

    Args:
        bounds: Upper bounds of the buckets, rising; the last bucket has none.
    """

    __slots__ = ("_bounds", "_counts", "_labels", "_sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._labels = [f'le="{_format(bound)}"' for bound in (*bounds, float("inf"))]
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Count one observation."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def observe_all(self, values: Sequence[float]) -> None:
        """Count many observations."""
        counts, bounds = self._counts, self._bounds
        for value in values:
            counts[bisect_left(bounds, value)] += 1
        self._sum += sum(values)

    def samples(self) -> Iterator[tuple[str, str, float]]:
        """Yield what the page shows; see Gauge. A bucket's count includes those of the buckets below."""
        total = 0
        for label, total in zip(self._labels, accumulate(self._counts), strict=True):
            yield "_bucket", label, total
        yield "_count", "", total
        yield "_sum", "", self._sum


class _Series(Protocol):
    def samples(self) -> Iterator[tuple[str, str, float]]: ...


S = TypeVar("S", bound=_Series)


class Family(Generic[S]):
    """The series of one row of the table, by the values of its own labels.

    Args:
        row: What is known of it.
        model_labels: The labels of nearly every row.
        create: Makes a series at its start.
    """

    def __init__(self, row: MetricRow, model_labels: Mapping[str, str], create: Callable[[], S]) -> None:
        self._row = row
        self._model_labels = model_labels if row.has_model_labels else {}
        self._create = create
        self._series: dict[tuple[str, ...], tuple[str, str, S]] = {}
        for values in [(value,) for value in row.values] if row.labels else [()]:
            self.at(*values)

    def at(self, *values: str) -> S:
        """Return the series with these values of the row's own labels; it starts when first asked for."""
        found = self._series.get(values)
        if found is None:
            shown = tuple(map(_make_printable, values))
            if shown != values:
                return self.at(*shown)
            labels = {**dict(zip(self._row.labels, values, strict=True)), **self._model_labels}
            # Sorted by name, the bucket's among them, as Prometheus' own client has it: not everybody parses properly.
            before, after = (
                ",".join(f'{name}="{_escape(labels[name])}"' for name in sorted(labels) if (name > "le") is is_after)
                for is_after in (False, True)
            )
            found = self._series[values] = (before, after, self._create())
        return found[2]

    def write(self, row: MetricRow | None = None) -> Iterator[str]:
        """Yield the page's lines.

        Args:
            row: An alias of this family's row, to be shown in its stead.
        """
        row = row or self._row
        yield f"# HELP {row.name} {row.help}\n# TYPE {row.name} {row.kind}\n"
        for before, after, series in self._series.values():
            for suffix, own, value in series.samples():
                text = ",".join(filter(None, (before, own, after)))
                yield f"{row.name}{suffix}{{{text}}} {_format(value)}\n"


class RateWindow:
    """How much came a second, lately. Asking changes nothing, so any number of scrapers may ask.

    Args:
        clock: Seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds: deque[tuple[int, float]] = deque(maxlen=RATE_WINDOW_S)

    def add(self, amount: float) -> None:
        """Note that ``amount`` came now."""
        second = int(self._clock())
        if self._seconds and self._seconds[-1][0] == second:
            amount += self._seconds.pop()[1]
        self._seconds.append((second, amount))

    def get_rate(self) -> float:
        """Return the mean of the present second, as far as it has gone, and the whole ones before it."""
        now = self._clock()
        oldest = int(now) - RATE_WINDOW_S + 1
        return sum(amount for second, amount in self._seconds if second >= oldest) / (now - oldest)


def _format(value: float) -> str:
    # As all of Prometheus' clients write it, so that a bucket of 1e+06 is the same one on every server.
    return str(floatToGoString(value))  # type: ignore[no-untyped-call]


def _make_printable(value: str) -> str:
    return _UNPRINTABLE.sub("?", value)


def _escape(value: str) -> str:
    return _make_printable(value).replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")
