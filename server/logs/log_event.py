"""LogEvent: a message of the log that has figures, in words for people and in fields for programs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping


class LogEvent(ABC):
    """Logged as a message itself: ``logger.info(event)``. Its words and fields are asked for where they are needed.

    What they hold may come from a client: the formatters see to it that it cannot break a line.
    """

    @property
    @abstractmethod
    def title(self) -> str:
        """A few words, for a program's ``message``."""

    @property
    @abstractmethod
    def fields(self) -> Mapping[str, object]:
        """Figures by name, fit for JSON; not ts, level, logger, message or exception."""

    def __str__(self) -> str:
        """Return one line for people."""
        return self.title
