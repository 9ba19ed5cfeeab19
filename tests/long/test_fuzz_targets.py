"""Each fuzz target for a short while, always the same cases; tests/long/fuzz.py runs one for longer, with new ones."""

from __future__ import annotations

import logging

import pytest

from tests.long.fuzz import TARGETS, run_batch
from tests.long.fuzz_bodies import Pairs, Raw, write_json
from tests.long.fuzz_oracles import find_first_stop, is_path, parse_events
from tests.long.fuzz_requests import RequestCase, check_request
from tests.long.fuzz_texts import StopCase, check_stops
from tests.long.fuzz_tokens import TokenCase, check_tokens
from tests.server.fake_engine import HoldingDecodeStream

pytestmark = pytest.mark.long

_SEED = 20_000
_NUM_CASES = 500


@pytest.mark.model
@pytest.mark.parametrize("name", TARGETS)
def test_a_target_holds_for_a_while(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR, "server"):  # clients' odd fields are warned of, endlessly
        assert run_batch(TARGETS[name], _SEED, _NUM_CASES) >= _NUM_CASES


# ---------------------------------------------------------------------- what was found, kept as it was
@pytest.mark.parametrize(
    "case",
    [
        # What a decoder held back to the end was searched though min_tokens exempted it.
        StopCase("\n", ("\n",), min_tokens=1, decoder=HoldingDecodeStream),
    ],
)
def test_stops_found_by_fuzzing(case: StopCase) -> None:
    check_stops(case)


@pytest.mark.parametrize(
    "case",
    [
        # A stray byte spoiled the byte token that came in the same step.
        TokenCase("gemma", (52, 132)),
        # A context that began within a character spoiled the first characters behind it.
        TokenCase("gemma", (244, 163, 156, 132), prompt=(244, 163, 156, 132) * 2),
        # Not a fault: a special token between the bytes of a character is skipped, and they are joined.
        TokenCase("gemma", (198, 0, *[132] * 64)),
    ],
)
def test_tokens_found_by_fuzzing(case: TokenCase) -> None:
    check_tokens(case)


@pytest.mark.parametrize(
    "case",
    [
        # Refusals quoted numbers of thousands of digits in full.
        RequestCase("/v1/completions", b'{"prompt":[%s]}' % (b"7" * 4001)),
        RequestCase("/v1/completions", b'{"prompt":"a","min_tokens":%s}' % (b"7" * 4001)),
        RequestCase("/v1/completions", b'{"prompt":"%s","max_tokens":%s}' % (b"a" * 99, b"7" * 4001)),
    ],
)
def test_requests_found_by_fuzzing(case: RequestCase) -> None:
    check_request(case)


# ---------------------------------------------------------------------- the oracles themselves
def test_the_oracles_know_right_from_wrong() -> None:
    assert find_first_stop("xabc", ["bc", "ab"]) == ("x", "ab")
    assert find_first_stop("xab", ["b", "ab"]) == ("xa", "b")
    assert parse_events(b"\xef\xbb\xbf: ping\n\ndata: a\rdata:b\r\n\r\nevent: x\n\ndata: never ended") == ["a\nb"]
    body = {"messages": [{"content": 1, "a.b": [1]}], "a": {}}
    for path in ("a", "messages", "messages[0]", "messages[0].content", "messages[0].a.b[0]", "messages[0].missing"):
        assert is_path(path, body)
    for path in ("messages[1]", "a[0]", "a b", "messages[0].content.x", "messages.0"):
        assert not is_path(path, body)


def test_bodies_may_say_what_no_value_can() -> None:
    value = Pairs((("a", Raw(b"1e400")), ("a", "\ud800")))
    assert write_json(value, escapes=True) == rb'{"a":1e400,"a":"\ud800"}'
    assert write_json(value, escapes=False) == b'{"a":1e400,"a":"\xed\xa0\x80"}'
