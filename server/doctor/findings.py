"""Finding: one thing that the doctor looked at, what it saw, and what to do about it."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Level(enum.StrEnum):
    """How bad it is."""

    OK = "ok"
    NOTE = "note"  # worth knowing; nothing to do
    WARNING = "warning"  # it runs, but slower, smaller or other than meant
    ERROR = "error"  # it does not run


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing.

    Attributes:
        level: How bad.
        topic: A word or two.
        says: What was seen, in words.
        todo: What to do about it, a sentence; empty where nothing is to be done.
    """

    level: Level
    topic: str
    says: str
    todo: str = ""


def ok(topic: str, says: str) -> Finding:
    """Return what is as it should be."""
    return Finding(Level.OK, topic, says)


def note(topic: str, says: str, todo: str = "") -> Finding:
    """Return what is worth knowing."""
    return Finding(Level.NOTE, topic, says, todo)


def warning(topic: str, says: str, todo: str) -> Finding:
    """Return what costs something."""
    return Finding(Level.WARNING, topic, says, todo)


def error(topic: str, says: str, todo: str) -> Finding:
    """Return what keeps the server from running."""
    return Finding(Level.ERROR, topic, says, todo)
