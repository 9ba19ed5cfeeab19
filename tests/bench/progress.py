"""A bar on standard error, for benches that take minutes."""

from __future__ import annotations

import sys
from typing import TextIO

_WIDTH = 30


def format_bar(done: int, total: int, what: str) -> str:
    """Return ``[####......]  4/10  what``."""
    filled = _WIDTH * done // total
    return f"[{'#' * filled}{'.' * (_WIDTH - filled)}] {done:{len(str(total))}}/{total}  {what}"


class Progress:
    """Shows how far a bench is: overwrites itself on a terminal, elsewhere writes a line for each part.

    Args:
        total: Steps in all.
        out: Where.
    """

    def __init__(self, total: int, out: TextIO | None = None) -> None:
        self._out = out or sys.stderr
        self._total = total
        self._done = 0
        self._part = ""

    def advance(self, part: str, num_steps: int = 1) -> None:
        """Count steps of a part as done."""
        self._done += num_steps
        self.show(part)

    def show(self, part: str) -> None:
        """Name what is being done."""
        if self._out.isatty():
            self._out.write(f"\r\x1b[K{format_bar(self._done, self._total, part)}")
        elif part != self._part:
            self._out.write(f"{format_bar(self._done, self._total, part)}\n")
        self._part = part
        self._out.flush()

    def clear(self) -> None:
        """Take the bar away; what follows stands in its place."""
        if self._out.isatty():
            self._out.write("\r\x1b[K")
            self._out.flush()
