"""What must hold of texts, streams and refusals, written in the plainest way: the oracles of all fuzz targets."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

from engine_core import SamplingParams
from server.errors import RequestError

MAX_MESSAGE_CHARS = 500
# Words that no client should have to know. Quoted parts of a message are the client's own and may hold anything.
_PYTHON_WORDS = re.compile(
    r"\b(None|NoneType|True|False|dict|tuple|str|int|float|bool|bytes|pydantic|Traceback|[A-Z]\w*(Error|Exception))\b"
    r"|<class|object at 0x|\bInput should\b"
)
_QUOTED = re.compile(r'"(\\.|[^"\\])*("|…)|`[^`]*`', re.DOTALL)


# ---------------------------------------------------------------------- texts
def cut(items: Sequence[Any], cuts: Sequence[int]) -> list[Any]:
    """Return `items` in pieces, cut at these places (each taken modulo what there is)."""
    edges = [0, *sorted({place % (len(items) + 1) for place in cuts}), len(items)]
    return [items[start:end] for start, end in itertools.pairwise(edges)]


def find_first_stop(text: str, stops: Sequence[str], *, num_exempt: int = 0) -> tuple[str, str | None]:
    """Return what stands before the stop string that is complete first, and that; of several there the first listed.

    None is that ends within the first `num_exempt` characters.
    """
    for end in range(num_exempt + 1, len(text) + 1):
        for stop in stops:
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


def count_held_chars(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of a stop string."""
    lengths = (n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n]))
    return max(lengths, default=0)


def count_complete_chars(data: bytes) -> int:
    """Return how many characters `data`, the beginning of valid UTF-8, holds whole."""
    return len(data.decode(errors="ignore"))


def count_undecodable(data: Sequence[bytes]) -> int:
    """Return the largest number of tokens in a row after each of which the text ends in U+FFFD."""
    most = run = 0
    for index in range(len(data)):
        text = b"".join(data[: index + 1])[-16:].decode(errors="replace")
        run = run + 1 if text.endswith("\ufffd") else 0
        most = max(most, run)
    return most


def is_part(text: str, whole: str) -> bool:
    """Tell whether all characters of `text` stand in `whole` in the same order."""
    rest = iter(whole)
    return all(char in rest for char in text)


def check_offsets(offsets: Sequence[int], num_tokens: int, text: str) -> None:
    """Check that there is one for each token, in order, inside the text."""
    assert len(offsets) == num_tokens
    assert list(offsets) == sorted(offsets)
    assert all(0 <= offset <= len(text) for offset in offsets)


# ---------------------------------------------------------------------- server-sent events
def parse_events(data: bytes) -> list[str]:
    """Return the data of each event.

    Source: WHATWG HTML, "Parsing an event stream" and "Interpreting an event stream".
    """
    text = data.decode(errors="replace").removeprefix("\ufeff")
    events: list[str] = []
    pending: list[str] = []
    for line in re.split("\r\n|\r|\n", text):
        name, _, value = line.partition(":")
        if line == "":
            if pending:
                events.append("\n".join(pending))
            pending = []
        elif name == "data":
            pending.append(value.removeprefix(" "))
    return events


# ---------------------------------------------------------------------- refusals
def check_refusal(error: RequestError, body: Any) -> None:
    """Check that a refusal is the client's to mend, and tells how in a sentence.

    Args:
        error: What was raised.
        body: The decoded body; None where there was none.
    """
    message = error.message
    assert 400 <= error.reply.status < 500, error.kind
    assert len(message) < MAX_MESSAGE_CHARS, message
    # Only the hint to a name that is spelt otherwise is a question.
    assert message.endswith(".") or re.search(r"did you mean `\w+`\?$", message), message
    assert message[0].isupper() or message[0] == "`", message
    assert not _PYTHON_WORDS.search(_QUOTED.sub("", message)), message
    assert error.param is None or is_path(error.param, body), f"{error.param!r}: {message}"


def is_path(path: str, body: Any) -> bool:
    """Tell whether a path names something in the body, or a field that is missing there."""
    if isinstance(body, dict):
        cut_short = path.removesuffix("…") if path.endswith("…") else None
        if path in body or (cut_short is not None and any(name.startswith(cut_short) for name in body)):
            return True
        steps = [name for name in body if path.startswith((f"{name}.", f"{name}["))]
        return any(is_path(path[len(name) :].removeprefix("."), body[name]) for name in steps) or path.isidentifier()
    match = re.match(r"\[(\d+)\]", path)
    if match is None or not isinstance(body, list) or int(match[1]) >= len(body):
        return False
    rest = path[match.end() :].removeprefix(".")
    return rest == "" or is_path(rest, body[int(match[1])])


# ---------------------------------------------------------------------- what the engine may be asked
def check_sampling(params: SamplingParams, *, room: int, vocab_size: int) -> None:
    """Check every field against the range that SamplingParams documents.

    Args:
        params: Of one request.
        room: Tokens between its prompt and the end of the context, at least 1.
        vocab_size: Of the model.
    """
    assert 1 <= params.max_tokens <= room
    assert 0 <= params.min_tokens <= params.max_tokens
    ranges: list[tuple[float, Callable[[float], bool]]] = [
        (params.temperature, lambda x: 0 <= x <= 2),
        (params.top_p, lambda x: 0 < x <= 1),
        (params.min_p, lambda x: 0 <= x <= 1),
        (params.presence_penalty, lambda x: -2 <= x <= 2),
        (params.frequency_penalty, lambda x: -2 <= x <= 2),
        (params.repetition_penalty, lambda x: 0 < x <= 100),
    ]
    assert all(math.isfinite(value) and holds(value) for value, holds in ranges), params
    assert params.top_k >= 0
    assert 0 <= params.seed < 2**63
    assert all(0 <= token_id < vocab_size for token_id in (*params.stop_token_ids, *params.logit_bias))
    assert all(-100 <= bias <= 100 for bias in params.logit_bias.values())
    assert all(count is None or 0 <= count <= 20 for count in (params.num_logprobs, params.num_prompt_logprobs))
