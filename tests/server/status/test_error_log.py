from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from server.status.error_log import MAX_ERRORS, ErrorLog

logger = logging.getLogger("tests.server.status_errors")


@pytest.fixture
def errors() -> Iterator[ErrorLog]:
    log = ErrorLog()
    logger.addHandler(log)
    yield log
    logger.removeHandler(log)


def test_warnings_and_errors_are_kept_the_latest_first(errors: ErrorLog) -> None:
    logger.info("All is well.")
    logger.warning("request %s waits", "r1")
    try:
        raise ValueError("inner")
    except ValueError:
        logger.exception("the step failed\nsecond line")
    assert [(each.level, each.text) for each in errors.list_errors()] == [
        ("error", "the step failed"),
        ("warning", "request r1 waits"),
    ]
    assert errors.list_errors()[0].unix_time > 1e9


def test_only_the_last_few_are_kept_and_none_of_them_is_endless(errors: ErrorLog) -> None:
    for number in range(MAX_ERRORS + 5):
        logger.warning("%d %s", number, "x" * 10_000)
    kept = errors.list_errors()
    assert len(kept) == MAX_ERRORS
    assert kept[0].text.startswith(f"{MAX_ERRORS + 4} x") and len(kept[0].text) == 500


def test_a_message_that_does_not_fit_its_arguments_is_kept_as_it_is(errors: ErrorLog) -> None:
    errors.emit(logging.LogRecord("x", logging.ERROR, "f.py", 1, "%d tokens", ("many",), None))
    assert errors.list_errors()[0].text == "%d tokens"
