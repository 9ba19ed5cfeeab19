from __future__ import annotations

import json
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.json_text import (
    MAX_JSON_CONTAINERS_AND_STRINGS,
    MAX_JSON_SEPARATORS,
    JSONTextError,
    decode_json,
    encode_json,
    encode_long_json,
    scrub_surrogates,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(JSON)
def test_what_is_encoded_decodes_again(value: object) -> None:
    assert decode_json(encode_json(value)) == value


@given(st.text(st.characters(categories=["Cs", "Lu", "Po"])))
def test_lone_surrogates_become_replacement_characters(text: str) -> None:
    expected = json.loads(json.dumps(text))  # joins the pairs
    assert decode_json(json.dumps({"a": text}).encode()) == {"a": scrub_surrogates(expected)}


@pytest.mark.parametrize(
    ("body", "value"),
    [
        (rb'"\ud83d\ude00"', "😀"),
        (rb'"\ud83d"', "\ufffd"),
        (rb'"\ude00\ud83d"', "\ufffd\ufffd"),
        (rb'"\ud83d\ud83d\ude00"', "\ufffd😀"),
        (rb'"\ud83d\\ude00"', "\ufffd\\ude00"),
        (rb'"\\ud83d \ud83d"', "\\ud83d \ufffd"),
        (b'"\xed\xa0\xbd"', "\ufffd"),
        (rb'{"\ud83d":1}', {"\ufffd": 1}),
    ],
)
def test_surrogates_however_they_are_written(body: bytes, value: object) -> None:
    assert decode_json(body) == value


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{} {}",
        b"nope",
        b"NaN",
        b'{"a":Infinity}',
        b'{"a":-Infinity}',
        b"\xff\xfe",
        b'"\xff"',
        rb'"\ud83"',
        b"[" * 100_000,
        b"[" * 1000 + b"]" * 1000,
        b"1" * 10_000,
        '{"a":1}'.encode("utf-16"),
    ],
)
def test_what_is_not_json_is_refused_with_a_sentence(body: bytes) -> None:
    with pytest.raises(JSONTextError, match=r"^The body is not valid JSON: .*\.$"):
        decode_json(body)


@pytest.mark.parametrize(
    "body",
    [
        b"[" + b"1," * (MAX_JSON_SEPARATORS + 1) + b"1]",
        b"[" + b"[]," * (MAX_JSON_CONTAINERS_AND_STRINGS + 1) + b"1]",
        b"[" + b"{}," * (MAX_JSON_CONTAINERS_AND_STRINGS + 1) + b"1]",
        b"[" + b'"",' * (MAX_JSON_CONTAINERS_AND_STRINGS + 1) + b"1]",
    ],
)
def test_a_body_of_millions_of_values_is_refused_before_it_is_decoded(body: bytes) -> None:
    with pytest.raises(JSONTextError, match="too many JSON values"):
        decode_json(body)


def test_punctuation_inside_a_long_text_counts_for_nothing() -> None:
    text = r'[{,"\,' * 500_000
    assert decode_json(json.dumps({"a": text, "b": [1, 2]}).encode()) == {"a": text, "b": [1, 2]}


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_long_json_is_the_same_json(value: object) -> None:
    assert encode_long_json(value) == encode_json(value)
    assert encode_long_json({"a": "\ud800é"}) == encode_json({"a": "\ud800é"})


def test_long_json_is_not_kept_in_pieces() -> None:
    value = ["a"] * 50_000
    tracemalloc.start()
    try:
        body = encode_long_json(value)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 4 * len(body)
