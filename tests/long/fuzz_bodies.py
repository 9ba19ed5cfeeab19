"""Request bodies for fuzzing: valid ones, and what becomes of them by mutation, written down as JSON of any quality.

Values are plain JSON values, but for Raw (bytes that stand for a value) and Pairs (an object whose keys may repeat).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

MAX_BODY_BYTES = 64 * 1024
ODD_CHARS = '\u2028\x00\r\n\x7f\ufeff\ufffd\uffff\ud800\udfff"\\/{}[]:,é😀\u202e\u0301`%.…'
_WORDS = ["", " ", "NaN", "null", "{param}", "{0}", "%s", "a.b[0]", "1", "-1", "\0", "\ud83d"]
# Not st.text of both: that draws from their union, in which the odd ones are lost.
ODD_TEXT = st.sampled_from(_WORDS) | st.lists(st.sampled_from(ODD_CHARS) | st.characters(), max_size=8).map("".join)


@dataclass(frozen=True)
class Raw:
    """Bytes that stand where a value should."""

    data: bytes


@dataclass(frozen=True)
class Pairs:
    """An object as its members stand in the text."""

    members: tuple[tuple[str, Any], ...]


# ---------------------------------------------------------------------- valid bodies
_MODEL = st.sampled_from(["org/fake-model", ""])
_TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
_IDS = st.lists(st.integers(0, 999), min_size=1, max_size=8)
_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "model": _MODEL,
    "n": st.integers(1, 4),
    "temperature": st.floats(0, 2) | st.integers(0, 2),
    "top_p": st.floats(0, 1),
    "top_k": st.integers(-1, 2000),
    "min_p": st.floats(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 100),
    "logit_bias": st.dictionaries(st.integers(0, 999).map(str), st.floats(-100, 100), max_size=3),
    "seed": st.integers(-(2**63), 2**63 - 1),
    "stop": _TEXT | st.lists(_TEXT, max_size=4),
    "stop_token_ids": _IDS,
    "include_stop_str_in_output": st.booleans(),
    "min_tokens": st.integers(0, 3),
    "ignore_eos": st.booleans(),
    "prompt_logprobs": st.integers(0, 20),
    "priority": st.just(0),
    "cache_salt": _TEXT,
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({}, optional={"include_usage": st.booleans()}),
    "user": _TEXT,
    "store": st.just(False),
    "best_of": st.just(1),
    "response_format": st.just({"type": "text"}),
}


@st.composite
def _body(draw: st.DrawFn, required: dict[str, st.SearchStrategy[Any]], optional: dict[str, Any]) -> dict[str, Any]:
    """Draw the required fields and a few of the others: with all of them hardly a body would be taken."""
    names = draw(st.lists(st.sampled_from(list(optional)), max_size=5, unique=True))
    if "stream_options" in names and "stream" in optional:
        optional = {**optional, "stream": st.just(True)}
        names.append("stream")
    return draw(st.fixed_dictionaries({**required, **{name: optional[name] for name in names}}))


_PART = st.fixed_dictionaries({"type": st.sampled_from(["text", "input_text"]), "text": _TEXT})
_MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool", "developer"]),
        "content": _TEXT | st.lists(_PART, max_size=3),
    },
    optional={
        "name": _TEXT,
        "refusal": st.just(""),
        "tool_calls": st.just([]),
        "reasoning_content": _TEXT,
        "annotations": st.none(),
    },
)
_MESSAGES = st.lists(_MESSAGE, min_size=1, max_size=4)
_PROMPT = st.one_of(_TEXT, _IDS, st.lists(_TEXT, min_size=1, max_size=3), st.lists(_IDS, min_size=1, max_size=3))
_COMPLETION = _body(
    {"prompt": _PROMPT},
    {**_FIELDS, "max_tokens": st.integers(1, 99), "echo": st.booleans(), "logprobs": st.integers(0, 20)},
)
_CHAT = _body(
    {"messages": _MESSAGES},
    {
        **_FIELDS,
        "max_tokens": st.integers(1, 99),
        "max_completion_tokens": st.integers(1, 99),
        "logprobs": st.booleans(),
        "tools": st.just([]),
    },
)
_TOKENIZE_OPTIONS = {
    name: st.booleans() for name in ("add_special_tokens", "add_generation_prompt", "return_token_strs")
}
_TOKENIZE = st.fixed_dictionaries({"prompt": _TEXT}, optional={"model": _MODEL, **_TOKENIZE_OPTIONS}) | (
    st.fixed_dictionaries({"messages": _MESSAGES}, optional={"model": _MODEL, **_TOKENIZE_OPTIONS})
)
VALID_BODIES: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    "/v1/completions": _COMPLETION,
    "/v1/chat/completions": _CHAT,
    "/v1/completions/render": _COMPLETION,
    "/v1/chat/completions/render": _CHAT,
    "/tokenize": _TOKENIZE,
    "/detokenize": st.fixed_dictionaries({"tokens": _IDS}, optional={"model": _MODEL}),
}

# ---------------------------------------------------------------------- odd values
_RAW = b"NaN Infinity -Infinity 1e400 -1e400 1e-400 -0 -0.0 01 1. .5 +1 0x1 1e 1E+2 tru nul None 'a' undefined".split()
_RAW_STRINGS = [
    b'"\xed\xa0\x80"',
    b'"\xff"',
    b'"\\ud800"',
    b'"\\ud83d\\ud83d\\ude00"',
    b'"\\u00"',
    b'"\\x"',
    b'"\n"',
    b'"a',
]
_NUMBERS = [0, -1, 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64, -(2**63) - 1, 10**40, 10**400, -(10**400)]
_SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from(_NUMBERS),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    ODD_TEXT,
    st.sampled_from([Raw(data) for data in (*_RAW, *_RAW_STRINGS)]),
    st.integers(4000, 4400).map(lambda digits: Raw(b"7" * digits)),
    st.sampled_from([[], {}, [[]], [{}], {"": None}, [None], [True, 1], ["a", 1], {"a": {"b": []}}]),
)


def _nest(value: Any, depth: int, is_object: bool) -> Any:
    for _ in range(depth):
        value = {"a": value} if is_object else [value]
    return value


@st.composite
def odd_values(draw: st.DrawFn) -> Any:
    """Draw a value that no field asks for; rarely a large one."""
    value = draw(_SCALARS)
    match draw(st.integers(0, 11)):
        case 0:
            return _nest(value, draw(st.sampled_from([1, 2, 5, 100, 150, 190])), draw(st.booleans()))
        case 1:
            return [value] * draw(st.sampled_from([2, 17, 129, 257, 1025, 5000]))
        case 2:
            return "".join(draw(st.lists(ODD_TEXT, max_size=3))) * draw(st.sampled_from([1, 60, 300, 2000]))
        case 3:
            return {f"{index}": value for index in range(draw(st.sampled_from([3, 1025])))}
    return value


# ---------------------------------------------------------------------- mutations of values
def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict):
        for name, item in list(value.items())[:30]:
            yield from _paths(item, (*path, name))
    elif isinstance(value, list):
        for index, item in enumerate(value[:10]):
            yield from _paths(item, (*path, index))


def _get(value: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        value = value[step]
    return value


def _set(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    if not path:
        return new
    copy = value.copy()
    copy[path[0]] = _set(value[path[0]], path[1:], new)
    return copy


def _drop(value: Any, path: tuple[Any, ...]) -> Any:
    parent = _get(value, path[:-1]).copy()
    del parent[path[-1]]
    return _set(value, path[:-1], parent)


def _rename(value: Any, path: tuple[Any, ...], name: str) -> Any:
    parent = _get(value, path[:-1])
    if not isinstance(parent, dict):
        return value
    return _set(value, path[:-1], {name if old == path[-1] else old: item for old, item in parent.items()})


@st.composite
def mutated(draw: st.DrawFn, value: Any) -> Any:
    """Draw `value` with one thing changed: dropped, replaced, swapped, nested, renamed or added."""
    paths = list(_paths(value))
    path = draw(st.sampled_from(paths))
    kind = draw(st.sampled_from(["replace", "replace", "drop", "swap", "nest", "rename", "add", "double"]))
    here = _get(value, path)
    if kind == "drop" and path:
        return _drop(value, path)
    if kind == "rename" and path:
        return _rename(
            value,
            path,
            draw(ODD_TEXT | st.sampled_from(["Prompt", "maxTokens", "temprature", "messages", "stream_options"])),
        )
    if kind == "swap":
        return _set(value, path, _get(value, draw(st.sampled_from(paths))))
    if kind == "nest":
        return _set(value, path, _nest(here, draw(st.integers(1, 3)), draw(st.booleans())))
    if kind == "add" and isinstance(here, dict):
        return _set(value, path, {**here, draw(ODD_TEXT | st.sampled_from(list(_FIELDS))): draw(odd_values())})
    if kind == "double" and isinstance(here, list):
        return _set(value, path, here * draw(st.integers(2, 90)))
    return _set(value, path, draw(odd_values()))


@st.composite
def doubled_keys(draw: st.DrawFn, value: Any) -> Any:
    """Draw the body with a member written twice, the second time maybe with another value."""
    if not isinstance(value, dict) or not value:
        return value
    name = draw(st.sampled_from(list(value)))
    members = [*value.items(), (name, draw(odd_values() | st.just(value[name])))]
    return Pairs(tuple(members if draw(st.booleans()) else members[::-1]))


# ---------------------------------------------------------------------- values to bytes
def write_json(value: Any, *, escapes: bool) -> bytes:
    """Return a value as JSON; lone surrogates escaped, or as the bytes that UTF-8 forbids."""
    match value:
        case Raw():
            return value.data
        case str():
            text = json.dumps(value, ensure_ascii=escapes)
            return text.encode(errors="surrogatepass")
        case list():
            return b"[" + b",".join(write_json(item, escapes=escapes) for item in value) + b"]"
        case dict() | Pairs():
            members = value.items() if isinstance(value, dict) else value.members
            written = (
                write_json(name, escapes=escapes) + b":" + write_json(item, escapes=escapes) for name, item in members
            )
            return b"{" + b",".join(written) + b"}"
    return json.dumps(value).encode()


@st.composite
def _broken(draw: st.DrawFn, body: bytes) -> bytes:
    at = draw(st.integers(0, len(body)))
    to = min(len(body), at + draw(st.integers(0, 8)))
    kind = draw(st.sampled_from(["cut", "drop", "insert", "repeat", "pad", "mark"]))
    if kind == "cut":
        return body[:at]
    if kind == "drop":
        return body[:at] + body[to:]
    if kind == "insert":
        piece = draw(
            st.binary(min_size=1, max_size=4)
            | st.sampled_from([b'"', b"\\", b"[" * 300, b"{", b"}", b",", b"\0", b"\xe2\x80\xa8"])
        )
        return body[:at] + piece + body[at:]
    if kind == "repeat":
        return body[:to] + body[at:to] * draw(st.sampled_from([1, 2, 500])) + body[to:]
    if kind == "mark":
        return draw(st.sampled_from([b"\xef\xbb\xbf", b"\x1e", b"//\n", b"\xfe\xff", b"\0"])) + body
    return body + draw(st.sampled_from([b" ", b"\n", b"x", b"]", b"{}"])) * draw(st.sampled_from([1, 2, 60_000]))


@st.composite
def bodies(draw: st.DrawFn, path: str) -> bytes:
    """Draw a body for an endpoint: valid, mutated, or bytes that are hardly one."""
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return draw(st.binary(max_size=200))
    value: Any = draw(VALID_BODIES[path if kind > 1 else draw(st.sampled_from(list(VALID_BODIES)))])
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2, 4]))):
        value = draw(mutated(value))
    if draw(st.integers(0, 9)) == 0:
        value = draw(doubled_keys(value))
    body = write_json(value, escapes=draw(st.booleans()))
    if draw(st.integers(0, 4)) == 0:
        body = draw(_broken(body))
    return body[:MAX_BODY_BYTES]
