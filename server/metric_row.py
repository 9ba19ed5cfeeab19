"""MetricRow: what is known of one metric, and the bucket bounds that rows share."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["gauge", "counter", "histogram"]

# Source: vLLM, vllm/v1/metrics/loggers.py: dashboards add up buckets of many servers, so the bounds must be equal.
FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
TOKEN_GAP_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0),
    *(60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
CHOICES = (1, 2, 5, 10, 20)
# 0.1, 0.5 and 1 are prometheus-fastapi-instrumentator's only ones; a whole answer takes longer.
HTTP_S = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
# Stands for 1, 2, 5, 10, 20 ... up to the context's length.
CONTEXT_TOKENS: tuple[float, ...] = (-1,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Healthy:
    """Where a value is while all is well; dashboards colour by it, and alerts go by its alarm.

    Attributes:
        low: From here.
        high: To here.
        alarm: Above it something has to be done.
        share_of: The row whose value this range is a share of; "" = of 1, or of the row's own unit.
        is_low_bad: Below it something is amiss; else there is little to do.
    """

    low: float = 0.0
    high: float = math.inf
    alarm: float = math.inf
    share_of: str = ""
    is_low_bad: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricRow:
    """One metric.

    Attributes:
        name: As on the page; a counter's ends in ``_total``.
        kind: What Prometheus calls its type.
        unit: Of its value.
        help: What it counts, in a sentence.
        labels: Its own, beside ``model_name`` and ``engine``.
        values: Of the first of them: the series that exist from the start, since rate() misses a series' first event.
        buckets: A histogram's upper bounds; see ``bounds``.
        tells: What a healthy value is, or what another one means.
        healthy: The same as a range, where there is one: of the value, or of the growth a second of a counter.
        alias_of: The row whose series this one shows, so that the two can never differ.
        has_model_labels: Whether it carries ``model_name`` and ``engine``.
    """

    name: str
    kind: Kind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    values: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    tells: str = ""
    healthy: Healthy | None = None
    alias_of: str = ""
    has_model_labels: bool = True

    def bounds(self, max_model_len: int) -> tuple[float, ...]:
        """Return the upper bounds of its buckets.

        Args:
            max_model_len: The context, in tokens.
        """
        return build_1_2_5(max_model_len) if self.buckets == CONTEXT_TOKENS else self.buckets


def build_1_2_5(limit: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50 ... as far as they do not exceed ``limit``."""
    bounds = (mantissa * 10**exponent for exponent in range(len(str(limit))) for mantissa in (1, 2, 5))
    return tuple(bound for bound in bounds if bound <= limit)


def gauge(
    name: str,
    unit: str,
    help: str,
    tells: str = "",
    *,
    labels: tuple[str, ...] = (),
    healthy: Healthy | None = None,
) -> MetricRow:
    return MetricRow(name=name, kind="gauge", unit=unit, help=help, tells=tells, labels=labels, healthy=healthy)


def counter(name: str, unit: str, help: str, tells: str = "", *, healthy: Healthy | None = None) -> MetricRow:
    return MetricRow(name=name, kind="counter", unit=unit, help=help, tells=tells, healthy=healthy)


def histogram(name: str, unit: str, buckets: tuple[float, ...], help: str, tells: str = "") -> MetricRow:
    return MetricRow(name=name, kind="histogram", unit=unit, buckets=buckets, help=help, tells=tells)


def by_label(label: str, values: tuple[str, ...], row: MetricRow) -> MetricRow:
    return replace(row, labels=(label,), values=values)
