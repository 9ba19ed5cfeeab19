from __future__ import annotations

import io
import logging

import pytest

from server.logs.log_text import SafeFormatter, escape_text

FORGED = "2026-01-01 00:00:00,000 ERROR server.access.auth: all keys have been stolen"


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("plain, Größe, 漢字, 🚀", "plain, Größe, 漢字, 🚀"),
        ("a\nb\r\nc\td", "a\\nb\\r\\nc\\td"),
        ("\x1b[31mred\x1b[0m", "\\x1b[31mred\\x1b[0m"),
        ("\x9b31m", "\\x9b31m"),
        ("a\u2028b\u2029c\x85d\x0be", "a\\u2028b\\u2029c\\x85d\\x0be"),
        ("user\u202eresu", "user\\u202eresu"),
        ("\u2066x\u2069\u200b\ufeff", "\\u2066x\\u2069\\u200b\\ufeff"),
        ("\ud800", "\\ud800"),
        ("\U000e0041", "\\U000e0041"),
        ("\x00", "\\x00"),
    ],
)
def test_what_moves_colours_or_turns_a_line_is_spelt_out(text: str, escaped: str) -> None:
    assert escape_text(text) == escaped


def log_to_text(name: str, log: object) -> list[str]:
    """Have a function log through our formatter; return the lines as a reader of the file sees them."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(SafeFormatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    logger = logging.getLogger(name)
    logger.addHandler(handler)
    try:
        log(logger)  # type: ignore[operator]
    finally:
        logger.removeHandler(handler)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("name", ["server.request_reader", "uvicorn.error", "uvicorn.access"])
def test_no_message_makes_a_second_line(name: str) -> None:
    (line,) = log_to_text(name, lambda logger: logger.error("a field is not known: %s", f"x\n{FORGED}\u2028{FORGED}"))
    assert line.count("stolen") == 2


def test_lines_of_a_traceback_are_indented_whatever_the_exception_says() -> None:
    def fail(logger: logging.Logger) -> None:
        try:
            raise ValueError(f"bad value\n{FORGED}\r{FORGED}\x1b[2J")
        except ValueError:
            logger.exception("a request failed\n")

    first, *rest = log_to_text("uvicorn.error", fail)
    assert first.endswith("a request failed")
    assert len(rest) > 3 and all(line.startswith("    ") for line in rest)
    assert not any("\x1b" in line for line in rest)


def test_a_stack_is_indented_too() -> None:
    first, *rest = log_to_text("server.x", lambda logger: logger.error("here", stack_info=True))
    assert first.endswith("here") and rest and all(line.startswith("    ") for line in rest)
