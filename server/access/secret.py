"""Secret: a text of the configuration that must not be shown. Knows not what it is for."""

from __future__ import annotations


class Secret:
    """A text whose repr, str and equality tell nothing of it, so that it may stand in a configuration.

    Args:
        text: What to keep.
    """

    __slots__ = ("_text",)

    def __init__(self, text: str) -> None:
        self._text = text

    def reveal(self) -> str:
        """Return the text."""
        return self._text

    def __repr__(self) -> str:
        return "***"


def parse_secret(text: str) -> Secret:
    """Return a secret from a flag's text; it is never repeated in a message.

    Raises:
        ValueError: It is empty.
    """
    if not text:
        raise ValueError("must not be empty")
    return Secret(text)
