from __future__ import annotations

import json
import logging
import sys
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.logs.log_event import LogEvent
from server.logs.log_format import JsonFormatter, TextFormatter

NASTY = 'a\n2026-01-01 INFO  forged\r\n\x1b[2J\x07\x00 "\\ \u2028\u2029\x85\u202e tail \ud800 end \U0001f600 é'


class Event(LogEvent):
    @property
    def title(self) -> str:
        return "three words said"

    @property
    def fields(self) -> Mapping[str, object]:
        return {"count": 3, "share": 0.5, "nothing": None, "text": NASTY}

    def __str__(self) -> str:
        return "for people"


def build(message: object, *args: object, **fields: Any) -> logging.LogRecord:
    record = logging.LogRecord("server.some", logging.WARNING, "f.py", 1, message, args, None)
    record.created = 1767225600.25  # 2026-01-01T00:00:00.250Z
    record.__dict__.update(fields)
    return record


def catch(message: str) -> Any:
    try:
        raise ValueError(message)
    except ValueError:
        return sys.exc_info()


def test_a_record_is_one_json_object() -> None:
    line = JsonFormatter().format(build("%d of %s", 3, "four"))
    assert json.loads(line) == {
        "ts": "2026-01-01T00:00:00.250Z",
        "level": "warning",
        "logger": "server.some",
        "message": "3 of four",
    }
    assert list(json.loads(line)) == ["ts", "level", "logger", "message"]


def test_an_events_fields_stand_beside_its_title() -> None:
    told = json.loads(JsonFormatter().format(build(Event())))
    assert (told["message"], told["count"], told["share"], told["nothing"]) == ("three words said", 3, 0.5, None)
    assert TextFormatter().format(build(Event())).endswith(" WARNING server.some: for people")


@pytest.mark.parametrize("message", [NASTY, "日本 and Zürich", "\udc80\ud83d"])
def test_whatever_a_message_holds_it_is_one_line_that_parses_and_tells_it(message: str) -> None:
    line = JsonFormatter().format(build("%s", message))
    assert "\n" not in line and line.isprintable()
    line.encode()
    told = json.loads(line)["message"]
    assert told == "".join("\ufffd" if "\ud800" <= each <= "\udfff" else each for each in message)


@given(st.text(alphabet=st.characters()) | st.text(alphabet='\x00\x1b\n\r\u2028\ud800\udfff\\"u'))
def test_any_text_makes_one_line_in_both_formats(text: str) -> None:
    record = build("%s", text)
    record.name = text
    line = JsonFormatter().format(record)
    assert len(line.splitlines()) == 1
    assert json.loads(line.encode())["logger"] is not None
    assert len(TextFormatter().format(record).splitlines()) == 1
    TextFormatter().format(record).encode()


def test_what_is_quoted_cannot_begin_a_line_of_text_or_steer_a_terminal() -> None:
    line = TextFormatter().format(build("%s", NASTY))
    assert len(line.splitlines()) == 1 and "\x1b" not in line
    assert r"a\n2026-01-01 INFO  forged\r\n\x1b[2J\x07\x00" in line
    assert line.endswith("tail \\ud800 end \U0001f600 é")


def test_an_exception_is_a_field_in_json_and_indented_in_text() -> None:
    record = build("it failed")
    record.exc_info = catch(NASTY)
    told = json.loads(JsonFormatter().format(record))
    assert told["message"] == "it failed"
    assert told["exception"].startswith("Traceback (most recent call last):\n") and "forged" in told["exception"]
    first, *others = TextFormatter().format(record).splitlines()
    assert first.endswith("it failed")
    assert len(others) > 2 and all(line.startswith("    ") for line in others)
    assert not any(line.startswith("2026") for line in others)


def test_a_stack_is_told_too() -> None:
    record = build("here", stack_info="Stack (most recent call last):\n  somewhere")
    assert json.loads(JsonFormatter().format(record))["stack"].endswith("somewhere")
    assert TextFormatter().format(record).endswith("\n      somewhere")


@pytest.mark.parametrize("args", [("text",), (1, 2)])
def test_a_message_whose_arguments_do_not_fit_is_told_as_it_stands(args: tuple[object, ...]) -> None:
    line = JsonFormatter().format(build("%d things", *args))
    assert json.loads(line)["message"] == "'%d things' cannot be shown with its arguments: TypeError"


def test_a_long_message_is_cut() -> None:
    line = JsonFormatter().format(build("%s", "x" * 1_000_000))
    assert len(line) < 10_000
    assert json.loads(line)["message"].endswith("x... (992000 more characters)")
    record = build("m")
    record.exc_info = catch("y" * 1_000_000)
    assert len(JsonFormatter().format(record)) < 40_000


def test_a_formatter_leaves_the_record_to_others_as_it_was() -> None:
    record = build("%s", "x")
    record.exc_info = catch("e")
    JsonFormatter().format(record)
    assert (record.msg, record.args, record.exc_text) == ("%s", ("x",), None)
