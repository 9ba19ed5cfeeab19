"""What an experiment hands in, and how figures are summed up and written down. Knows no engine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Figures = dict[str, float]


@dataclass(frozen=True, slots=True)
class Table:
    """A table as text.

    Attributes:
        header: Column titles, units included.
        rows: Cells, as many a row as the header has.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def to_markdown(self) -> str:
        """Return it in markdown: the first column to the left, figures to the right."""
        rule = ["---", *["--:"] * (len(self.header) - 1)]
        return "\n".join(f"| {' | '.join(cells)} |" for cells in [self.header, rule, *self.rows])


@dataclass(frozen=True, slots=True)
class Outcome:
    """An experiment's result.

    Attributes:
        table: For people.
        figures: The same, for programs: by regime, then by name with its unit.
        svg: The plot.
    """

    table: Table
    figures: dict[str, Figures]
    svg: str


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least ``share`` of the values do not exceed (nearest rank).

    Args:
        values: At least one, in any order.
        share: In (0, 1].
    """
    if not values:
        raise ValueError("a quantile needs at least one value")
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def format_ms(seconds: float) -> str:
    """Return whole milliseconds, with a comma every three digits."""
    return f"{seconds * 1e3:,.0f}"


def format_s(seconds: float) -> str:
    """Return seconds with as many digits as they deserve."""
    return f"{seconds:.2f}" if seconds < 10 else f"{seconds:.1f}"
