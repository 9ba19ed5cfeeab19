from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.sse import DONE, PING, TextEvent, build_event


@given(st.text() | st.text(st.characters(categories=["Cs", "Zl", "Cc"])))
def test_an_event_is_one_data_line_of_utf8(text: str) -> None:
    event = build_event({"text": text})
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    assert b"\r" not in event
    json.loads(event.removeprefix(b"data: ").decode())


@given(st.text() | st.text(st.characters(categories=["Cs", "Zl", "Cc"])))
def test_an_event_around_its_text_is_the_event_built_whole(text: str) -> None:
    def build(text: str) -> dict[str, object]:
        return {"model": TextEvent.PLACEHOLDER, "choices": [{"text": text, "finish_reason": None}]}

    assert TextEvent(build(TextEvent.PLACEHOLDER)).build(text) == build_event(build(text))


def test_characters_travel_as_themselves() -> None:
    assert build_event({"t": "é😀"}) == 'data: {"t":"é😀"}\n\n'.encode()


def test_a_lone_surrogate_becomes_a_replacement_character() -> None:
    assert build_event("\ud800") == 'data: "\ufffd"\n\n'.encode()


def test_done_and_ping_are_what_clients_and_proxies_expect() -> None:
    assert DONE == b"data: [DONE]\n\n"
    assert PING.startswith(b":")
    assert PING.endswith(b"\n\n")


@pytest.mark.parametrize(
    "separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\x1c", "\x1d", "\x1e", "\r", "\n"]
)
def test_no_reader_that_splits_lines_in_its_own_way_tears_an_event(separator: str) -> None:
    event = build_event({"text": f"a{separator}b"}).decode()
    (line, *rest) = event.splitlines()
    assert rest == [""]
    assert json.loads(line.removeprefix("data: ")) == {"text": f"a{separator}b"}
