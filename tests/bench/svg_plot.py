"""Small line and dot plots as SVG text, readable on light and on dark. Knows numbers and labels, nothing of engines.

Text and axes are in currentColor, which a style rule sets by the reader's colour scheme: inside an <img>, an SVG
inherits no colour of its page.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

# Of middle lightness, told apart by most colour-blind readers too; shape and dashes say the same again.
COLORS = ("#d9730d", "#2f7fe0", "#1f9d6b", "#a35bd6")
DASHES = ("", "7 3", "2 3", "9 3 2 3")

_STYLE = (
    "svg{color:#24292f;font:12px system-ui,-apple-system,'Segoe UI',Helvetica,Arial,sans-serif}"
    "@media(prefers-color-scheme:dark){svg{color:#d0d7de}}"
    "text{fill:currentColor}.axis{stroke:currentColor;stroke-opacity:.55}.grid{stroke:currentColor;stroke-opacity:.14}"
)
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 14, 34, 48
_LEGEND_HEIGHT = 26
_LETTER_WIDTH = 6.6
_NUM_TICKS = 5


@dataclass(frozen=True, slots=True)
class Series:
    """One regime's points.

    Attributes:
        name: For the legend.
        points: (x, y), by rising x where ``is_line``.
        style: Index into COLORS: the same regime looks the same in every panel.
        is_line: Joined, with a marker at each point where ``has_marks``; otherwise dots alone.
        has_marks: See ``is_line``.
    """

    name: str
    points: Sequence[tuple[float, float]]
    style: int
    is_line: bool = True
    has_marks: bool = True


@dataclass(frozen=True, slots=True)
class Panel:
    """A pair of axes.

    Attributes:
        title: Above it; may be empty.
        x_label: With the unit.
        y_label: With the unit.
        series: Drawn in this order; no x is below 0, nor any y.
        is_log: The y axis is logarithmic: all y must be above 0.
        x_max: Right end of the x axis; 0 = from the points.
        y_max: Top of the y axis; 0 = from the points.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    is_log: bool = False
    x_max: float = 0.0
    y_max: float = 0.0


@dataclass(frozen=True, slots=True)
class _Axis:
    """Maps values to pixels."""

    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def place(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.is_log else (self.low, self.high)
        share = ((math.log10(value) if self.is_log else value) - low) / (high - low)
        return self.start + share * (self.end - self.start)

    def ticks(self) -> list[float]:
        if self.is_log:
            return list(log_ticks(self.low, self.high))
        step = nice_step(self.high - self.low)
        return [i * step for i in range(math.ceil(self.low / step), math.floor(self.high / step + 1e-9) + 1)]


def nice_step(span: float) -> float:
    """Return 1, 2 or 5 times a power of ten that cuts the span into about five parts.

    Args:
        span: Above 0.
    """
    rough = span / _NUM_TICKS
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def log_ticks(low: float, high: float) -> Iterator[float]:
    """Yield 1, 2 and 5 times the powers of ten within [low, high]; over three decades or more, the powers only."""
    factors = (1,) if high / low >= 1000 else (1, 2, 5)
    for exponent in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        for factor in factors:
            if low <= factor * 10.0**exponent * 1.000001 and factor * 10.0**exponent <= high * 1.000001:
                yield factor * 10.0**exponent


def plot(panels: Sequence[Panel], *, width: int = 760, height: int = 280, description: str) -> str:
    """Draw panels side by side, with one legend where there is more than one series.

    Args:
        panels: At least one, each with at least one point.
        width: Of the whole, in pixels.
        height: As above, legend included.
        description: For who cannot see it.

    Returns:
        An SVG document.
    """
    named = {series.name: series for panel in panels for series in panel.series}
    legend_height = _LEGEND_HEIGHT if len(named) > 1 else 0
    panel_width = width / len(panels)
    body = [*_draw_legend(list(named.values()))] if legend_height else []
    for i, panel in enumerate(panels):
        body += _draw_panel(panel, i * panel_width, legend_height, panel_width, height - legend_height)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
            f' role="img" aria-label="{escape(description, {chr(34): "&quot;"})}">',
            f"<style>{_STYLE}</style>",
            *body,
            "</svg>\n",
        ]
    )


def _draw_legend(series: Sequence[Series]) -> Iterator[str]:
    x = float(_LEFT)
    for one in series:
        yield from _draw_points(one, [(x, 14.0), (x + 22.0, 14.0)] if one.is_line else [(x + 11.0, 14.0)])
        yield _text(x + 30, 18, one.name)
        x += 30 + len(one.name) * _LETTER_WIDTH + 24


def _draw_panel(panel: Panel, x: float, y: float, width: float, height: float) -> Iterator[str]:
    x_axis, y_axis = _build_axes(panel, x, y, width, height)
    left, right, bottom, top = x_axis.start, x_axis.end, y_axis.start, y_axis.end
    middle = (left + right) / 2
    if panel.title:
        yield _text(middle, top - 12, panel.title, 'text-anchor="middle" font-weight="600"')
    for value in y_axis.ticks():
        at = y_axis.place(value)
        yield _line(left, at, right, at, "grid")
        yield _text(left - 7, at + 4, f"{value:,g}", 'text-anchor="end"')
    for value in x_axis.ticks():
        yield _line(x_axis.place(value), bottom, x_axis.place(value), bottom + 4, "axis")
        yield _text(x_axis.place(value), bottom + 18, f"{value:,g}", 'text-anchor="middle"')
    yield _line(left, bottom, right, bottom, "axis")
    yield _line(left, bottom, left, top, "axis")
    yield _text(middle, bottom + 38, panel.x_label, 'text-anchor="middle"')
    label_x, label_y = x + 14, (bottom + top) / 2
    turned = f'text-anchor="middle" transform="rotate(-90 {label_x:.1f} {label_y:.1f})"'
    yield _text(label_x, label_y, panel.y_label, turned)
    for series in panel.series:
        yield from _draw_points(series, [(x_axis.place(px), y_axis.place(py)) for px, py in series.points])


def _build_axes(panel: Panel, x: float, y: float, width: float, height: float) -> tuple[_Axis, _Axis]:
    xs, ys = zip(*(point for series in panel.series for point in series.points), strict=True)
    left, right = x + _LEFT, x + width - _RIGHT
    bottom, top = y + height - _BOTTOM, y + _TOP - (0 if panel.title else 20)
    # Room for the last mark.
    x_axis = _Axis(0.0, panel.x_max or max(*xs, 1e-9) * 1.02, left, right)
    if panel.is_log:
        return x_axis, _Axis(min(ys) / 1.25, (panel.y_max or max(ys)) * 1.25, bottom, top, is_log=True)
    y_max = panel.y_max or max(*ys, 1e-9)
    step = nice_step(y_max)
    return x_axis, _Axis(0.0, math.ceil(y_max / step - 1e-9) * step, bottom, top)


def _draw_points(series: Series, points: Sequence[tuple[float, float]]) -> Iterator[str]:
    color = COLORS[series.style]
    if series.is_line:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = f' stroke-dasharray="{DASHES[series.style]}"' if DASHES[series.style] else ""
        yield f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.6"{dash}/>'
    if series.has_marks or not series.is_line:
        yield from (_mark(x, y, series.style) for x, y in points)


def _mark(x: float, y: float, style: int) -> str:
    color = COLORS[style]
    if style % 2:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.4" fill="{color}" fill-opacity=".8"/>'
    return f'<rect x="{x - 3:.1f}" y="{y - 3:.1f}" width="6" height="6" fill="{color}" fill-opacity=".8"/>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _text(x: float, y: float, text: str, attributes: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" {attributes}>{escape(text)}</text>'
