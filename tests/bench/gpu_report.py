"""The figures of tests/bench/gpu.py: how they are written down as they come, judged, and set in a table. Pure but for
one file, which stages append to and the command reads; a run that is cut short has all up to then.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

_NAME_WIDTH = 52


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One thing that was measured, or checked.

    Attributes:
        stage: Of which stage.
        name: What.
        unit: Of median, low, high and floor.
        median: Of ``n`` samples.
        n: Samples.
        low: Least sample.
        high: Greatest sample.
        floor: What the card's own rates allow; None = there is no such bound.
        formula: How the floor was reckoned, with the numbers in it.
        goal: What is aimed at, in words; empty = nothing.
        is_met: Whether the goal is met; None = there is none.
    """

    stage: str
    name: str
    unit: str
    median: float
    n: int
    low: float
    high: float
    floor: float | None = None
    formula: str = ""
    goal: str = ""
    is_met: bool | None = None

    @property
    def ratio(self) -> float | None:
        """How many times the floor it is."""
        return self.median / self.floor if self.floor else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A fact in words, or a check: what fails is listed at the end.

    Attributes:
        stage: Of which stage.
        name: Of what.
        text: The fact.
        is_failure: It should be otherwise.
    """

    stage: str
    name: str
    text: str
    is_failure: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEnd:
    """How a stage ended.

    Attributes:
        stage: Which.
        status: done, failed, late (its time was up), or left out.
        seconds: It took.
        text: Why, where it is not done.
    """

    stage: str
    status: str
    seconds: float
    text: str = ""


Line = Figure | Note | StageEnd
_KINDS: dict[str, type[Figure] | type[Note] | type[StageEnd]] = {"figure": Figure, "note": Note, "end": StageEnd}


@dataclass(frozen=True, slots=True)
class Goal:
    """What a figure should come to.

    Attributes:
        at_most_floors: So many times its floor, or less; 0 = not judged by it.
        at_most: In the figure's unit, or less; None = not judged by it.
        at_least: In the figure's unit, or more; None = not judged by it.
    """

    at_most_floors: float = 0.0
    at_most: float | None = None
    at_least: float | None = None

    def describe(self, unit: str) -> str:
        """Return it in words."""
        words = [
            f"<= {self.at_most_floors:g}x floor" if self.at_most_floors else "",
            "" if self.at_most is None else f"<= {self.at_most:g} {unit}",
            "" if self.at_least is None else f">= {self.at_least:g} {unit}",
        ]
        return ", ".join(word for word in words if word)

    def is_met_by(self, value: float, floor: float | None) -> bool:
        """Return whether a value is good enough."""
        return (
            (not self.at_most_floors or floor is None or value <= self.at_most_floors * floor)
            and (self.at_most is None or value <= self.at_most)
            and (self.at_least is None or value >= self.at_least)
        )


@dataclass(slots=True)
class Sink:
    """Takes what a stage finds and writes it down at once.

    Attributes:
        path: The file of lines.
        stage: Whose they are.
        is_dry: Nothing was measured: goals are not judged.
    """

    path: Path
    stage: str
    is_dry: bool = False

    def add(
        self,
        name: str,
        unit: str,
        samples: Sequence[float],
        *,
        floor: float | None = None,
        formula: str = "",
        goal: Goal | None = None,
    ) -> Figure:
        """Write a figure down and return it."""
        median = statistics.median(samples)
        figure = Figure(
            stage=self.stage,
            name=name,
            unit=unit,
            median=median,
            n=len(samples),
            low=min(samples),
            high=max(samples),
            floor=floor,
            formula=formula,
            goal=goal.describe(unit) if goal else "",
            is_met=goal.is_met_by(median, floor) if goal and not self.is_dry else None,
        )
        append(self.path, figure)
        return figure

    def note(self, name: str, text: str, *, is_failure: bool = False) -> None:
        """Write a fact down."""
        append(self.path, Note(stage=self.stage, name=name, text=text, is_failure=is_failure))


# ---------------------------------------------------------------------- the file
def append(path: Path, line: Line) -> None:
    """Write one line. Opened anew each time: whoever is killed after this has said it."""
    kind = next(name for name, each in _KINDS.items() if isinstance(line, each))
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": kind, **asdict(line)}, ensure_ascii=False) + "\n")


def read_lines(path: Path) -> list[Line]:
    """Return what is written, but for a last line that was cut."""
    lines: list[Line] = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            values: dict[str, Any] = json.loads(text)
        except ValueError:
            continue
        lines.append(_KINDS[values.pop("kind")](**values))
    return lines


def find_figure(lines: Sequence[Line], name: str) -> Figure | None:
    """Return the last figure of a name."""
    return next((each for each in reversed(lines) if isinstance(each, Figure) and each.name == name), None)


# ---------------------------------------------------------------------- the table
@dataclass(slots=True)
class Verdict:
    """What the lines come to.

    Attributes:
        num_missed: Goals not met.
        problems: Checks that failed and stages that did not end as they should, a sentence each.
    """

    num_missed: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:
        """Whether nothing failed. A goal that is missed is a finding, no failure."""
        return not self.problems


def judge(lines: Sequence[Line]) -> Verdict:
    """Count what is not as it should be."""
    verdict = Verdict()
    for line in lines:
        if isinstance(line, Figure):
            verdict.num_missed += line.is_met is False
        elif isinstance(line, Note):
            verdict.problems += [f"{line.stage}: {line.name}: {line.text}"] if line.is_failure else []
        elif line.status in ("failed", "late"):
            verdict.problems.append(f"{line.stage}: {line.status} after {line.seconds:.0f} s: {line.text}")
    return verdict


def format_table(lines: Sequence[Line], *, is_dry: bool = False) -> str:
    """Return all figures by stage, floors beside them, and what went wrong below."""
    out = [f"{'':{_NAME_WIDTH}} {'median':>12} {'floor':>12} {'x floor':>8}  {'n':>5}  goal"]
    stage = ""
    for line in lines:
        if isinstance(line, StageEnd):
            continue
        if line.stage != stage:
            stage = line.stage
            out.append(f"-- {stage}{_describe_end(lines, stage)}")
        out.append(format_figure(line) if isinstance(line, Figure) else f"   {line.name}: {line.text}")
    verdict = judge(lines)
    out += [f"!! {problem}" for problem in verdict.problems]
    if is_dry:
        out.append("DRY RUN on the fakes: the times mean nothing, and goals are not judged.")
    return "\n".join([*out, f"goals missed: {verdict.num_missed}; problems: {len(verdict.problems)}"])


def format_figure(figure: Figure) -> str:
    """Return its row."""
    floor = "" if figure.floor is None else _format_value(figure.floor, figure.unit)
    ratio = "" if figure.ratio is None else f"{figure.ratio:.2f}"
    mark = {True: " (met)", False: " (MISSED)", None: ""}[figure.is_met]
    row = f"{figure.name:{_NAME_WIDTH}} {_format_value(figure.median, figure.unit):>12} {floor:>12} {ratio:>8}"
    return f"{row}  {figure.n:>5}  {figure.goal}{mark}".rstrip()


def format_formulas(lines: Sequence[Line]) -> str:
    """Return how each floor was reckoned."""
    figures = [each for each in lines if isinstance(each, Figure) and each.formula]
    return "\n".join(f"{each.name}: {each.formula}" for each in figures)


def _format_value(value: float, unit: str) -> str:
    return f"{value:.4g} {unit}" if abs(value) < 10_000 else f"{value:.0f} {unit}"


def _describe_end(lines: Sequence[Line], stage: str) -> str:
    end = next((each for each in lines if isinstance(each, StageEnd) and each.stage == stage), None)
    return f" ({end.status}, {end.seconds:.0f} s)" if end else ""
