"""Fuzz targets of outgoing text: stop strings and server-sent events. Each is cases and a check of one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st
from openai._streaming import SSEDecoder

from engine_core import FinishReason, TokenLogprobs
from server.errors import ErrorKind, RequestError, build_error_body
from server.generation import GenerationOutput, TokenText
from server.json_text import scrub_surrogates
from server.logprob_replies import show_token
from server.output_text import OutputText
from server.replies import ChatShape, CompletionShape, ReplyHead, ReplyOptions
from server.reply_events import build_events
from server.sse import DONE, PING, build_event
from server.stop_strings import StopStrings
from tests.long.fuzz_oracles import (
    count_held_chars,
    cut,
    find_first_stop,
    parse_events,
)
from tests.server.fake_engine import CharDecodeStream, HoldingDecodeStream, char_bytes, create_request
from tests.server.fake_engine_client import FakeEngineClient

CUTS = st.lists(st.integers(0, 200), max_size=12)
ANY_CHAR = st.characters(exclude_categories=["Cs"])
ODD_CHARS = '\u2028\u2029\x85\r\n\0\x0b\x0c\x1c\x7f\ufeff\ufffd\ufffe"\\:/ data😀👩\u200d\u0301é\ud800\udfff'
# Not st.text of both: that draws from their union, in which the odd ones are lost.
ODD_TEXT = st.lists(st.sampled_from(ODD_CHARS) | ANY_CHAR, max_size=12).map("".join)


# ---------------------------------------------------------------------- stop strings
@dataclass(frozen=True)
class StopCase:
    """A text of one token a character, what ends it, and where it is cut."""

    text: str
    stops: tuple[str, ...]
    cuts: tuple[int, ...] = ()
    min_tokens: int = 0
    shows_stop: bool = False
    decoder: type[CharDecodeStream] = CharDecodeStream


@st.composite
def stop_cases(draw: st.DrawFn) -> StopCase:
    """Draw few characters, and a text of parts of the stop strings, so that overlaps and near misses are likely."""
    alphabet = draw(
        st.sampled_from(["ab", "a", "aé]", "[]^-\\", "\r\n "]) | st.lists(ANY_CHAR, min_size=1, max_size=3).map("".join)
    )
    stops = draw(st.lists(st.text(st.sampled_from(alphabet), min_size=1, max_size=8), max_size=5))
    beginnings = [stop[:length] for stop in stops for length in range(1, len(stop))]
    parts = [*alphabet, *beginnings, *beginnings, *stops[:1]]
    return StopCase(
        "".join(draw(st.lists(st.sampled_from(parts), max_size=12))),
        tuple(stops),
        tuple(draw(CUTS)),
        draw(st.integers(0, 12)) if draw(st.booleans()) else 0,
        draw(st.booleans()),
        draw(st.sampled_from([CharDecodeStream, HoldingDecodeStream])),
    )


def check_stops(case: StopCase) -> None:
    """Check StopStrings and OutputText on one case."""
    finder = StopStrings(case.stops)
    _check_finder(finder, case)
    _check_finder(finder.fork(), case)
    ids = list(map(ord, case.text))

    def read(cuts: Sequence[int], *, has_logprobs: bool) -> OutputSeen:
        output = OutputText(
            case.decoder([]),
            StopStrings(case.stops),
            token_bytes=char_bytes,
            min_tokens=case.min_tokens,
            shows_stop=case.shows_stop,
        )
        return read_output(output, ids, cuts, has_logprobs=has_logprobs)

    pieces = _decode_each(case.decoder([]), ids)
    expected = expect_output(pieces, case.stops, min_tokens=case.min_tokens, shows_stop=case.shows_stop)
    assert read(case.cuts, has_logprobs=True) == expected
    assert read(case.cuts, has_logprobs=False) == OutputSeen(expected.text, expected.stop, ())


def _check_finder(finder: StopStrings, case: StopCase) -> None:
    expected, stop = find_first_stop(case.text, case.stops)
    seen = shown = ""
    for piece in cut(case.text, case.cuts):
        seen += piece
        text, match = finder.feed(piece)
        shown += text
        if match is not None:
            assert (shown, match) == (expected, stop)
            return
        assert len(seen) - len(shown) == count_held_chars(seen, case.stops)
    assert (shown + finder.flush(), None) == (expected, stop)


@dataclass(frozen=True)
class OutputSeen:
    """All that an OutputText gave out: text, stop string, and the offset of each token."""

    text: str
    stop: str | None
    offsets: tuple[int, ...]


def read_output(output: OutputText, ids: Sequence[int], cuts: Sequence[int], *, has_logprobs: bool) -> OutputSeen:
    """Feed tokens in pieces, the last of which says so."""
    text, offsets = "", list[int]()
    pieces = cut(ids, cuts)
    for number, piece in enumerate(pieces, start=1):
        logprobs = [TokenLogprobs(token_id, -1.0, 1) for token_id in piece] if has_logprobs else None
        got = output.read(piece, logprobs, is_last=number == len(pieces))
        text += got.text
        offsets += [token.offset for token in got.tokens]
        if got.stop_string is not None:
            return OutputSeen(text, got.stop_string, tuple(offsets))
    return OutputSeen(text, None, tuple(offsets))


def expect_output(pieces: Sequence[str], stops: Sequence[str], *, min_tokens: int, shows_stop: bool) -> OutputSeen:
    """Return what must come out.

    Args:
        pieces: What each token's arrival adds to the text, then what their end adds.
        stops: What ends it.
        min_tokens: No stop string ends in what so many tokens bring; the end brings nothing new.
        shows_stop: The stop string is shown.
    """
    exempt = "".join(pieces if len(pieces) - 1 <= min_tokens else pieces[:min_tokens])
    shown, stop = find_first_stop("".join(pieces), stops, num_exempt=len(exempt))
    text = shown + (stop if stop is not None and shows_stop else "")
    offsets = [len("".join(pieces[:index])) for index in range(len(pieces) - 1)]
    return OutputSeen(text, stop, tuple(offset for offset in offsets if stop is None or offset < len(text)))


def _decode_each(decoder: Any, ids: Sequence[int]) -> list[str]:
    return [*[decoder.feed([token_id]) for token_id in ids], decoder.flush()]


# ---------------------------------------------------------------------- server-sent events
@dataclass(frozen=True)
class EventCase:
    """Values to be sent, the texts and tokens of one streamed answer, and where the network cuts the bytes."""

    values: tuple[Any, ...]
    texts: tuple[str, ...]
    tokens: tuple[bytes, ...]
    cuts: tuple[int, ...] = ()
    is_chat: bool = False
    has_usage: bool = False


_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | ODD_TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(ANY_CHAR, max_size=6), inner, max_size=4),
    max_leaves=8,
)
EVENT_CASES = st.builds(
    EventCase,
    values=st.lists(_VALUES, max_size=3).map(tuple),
    texts=st.lists(ODD_TEXT, min_size=1, max_size=5).map(tuple),
    tokens=st.lists(st.binary(max_size=5) | ANY_CHAR.map(str.encode), max_size=4).map(tuple),
    cuts=CUTS.map(tuple),
    is_chat=st.booleans(),
    has_usage=st.booleans(),
)


def check_events(case: EventCase) -> None:
    """Check that every event is read again as one, with the same value, by two parsers."""
    refusals = [build_error_body(RequestError(text, kind=ErrorKind.INTERNAL, param=text)) for text in case.texts]
    values = [*case.values, *refusals]
    data = PING + b"".join(event + PING for event in map(build_event, values)) + DONE
    assert data.count(b"\n\n") == 2 * len(values) + 2  # PING and DONE too: no event's content makes a line of its own
    *events, last = _read_events(data, case.cuts)
    assert last == "[DONE]"
    assert [json.loads(event) for event in events] == [_scrub(value) for value in values]
    _check_answer(case)


def _read_events(data: bytes, cuts: Sequence[int]) -> list[str]:
    events = parse_events(data)
    places = [place * 37 for place in cuts]
    assert [event.data for event in SSEDecoder().iter_bytes(iter(cut(data, places)))] == events
    return events


def _scrub(value: Any) -> Any:
    if isinstance(value, str):
        return scrub_surrogates(value)
    if isinstance(value, list):
        return [_scrub(item) for item in value]
    return {name: _scrub(item) for name, item in value.items()} if isinstance(value, dict) else value


def _check_answer(case: EventCase) -> None:
    tokens = tuple(TokenText(7, data, 0, -1.5, 1) for data in case.tokens)
    outputs = [
        GenerationOutput(text, number, FinishReason.STOP if number == len(case.texts) else None, tokens=tokens)
        for number, text in enumerate(case.texts, start=1)
    ]
    options = ReplyOptions(has_logprobs=True, has_usage=case.has_usage)
    shape = (ChatShape if case.is_chat else CompletionShape)(ReplyHead("id", 0, "m", "fp"), options, char_bytes)
    data = asyncio.run(_stream(FakeEngineClient(lambda _: outputs), shape, has_usage=case.has_usage))
    *events, last = _read_events(data, case.cuts)
    assert last == "[DONE]"
    chunks = [json.loads(event) for event in events]
    if case.has_usage:
        assert chunks.pop()["choices"] == []
    choices = [chunk["choices"][0] for chunk in chunks]
    texts = [choice["delta"].get("content", "") if case.is_chat else choice["text"] for choice in choices]
    assert "".join(texts) == "".join(map(scrub_surrogates, case.texts))
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    told = [token for choice in choices if choice["logprobs"] for token in _token_names(choice["logprobs"])]
    assert told == [show_token(data) for data in case.tokens] * len(case.texts)


async def _stream(client: FakeEngineClient, shape: Any, *, has_usage: bool) -> bytes:
    return b"".join([event async for event in build_events(client, [create_request()], shape, has_usage=has_usage)])


def _token_names(logprobs: dict[str, Any]) -> list[str]:
    return logprobs["tokens"] if "tokens" in logprobs else [entry["token"] for entry in logprobs["content"]]
