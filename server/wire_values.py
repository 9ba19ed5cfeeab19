"""How the values of OpenAI's fields are read, where a type alone does not say it. Pure."""

from __future__ import annotations

import re
from typing import Any

from pydantic_core import PydanticCustomError

MAX_STOP_STRINGS = 16
# Their automaton takes 1.3 us and 300 bytes a character: 5 ms and 1.2 MB at most.
MAX_STOP_CHARS = 256
MAX_LOGIT_BIASES = 1024
MAX_PROMPTS = 256
_TOKEN_ID = re.compile("[0-9]{1,10}", re.ASCII)


def fail(sentence: str, *, at: str | None = None) -> PydanticCustomError:
    """Return what refuses a value.

    Args:
        sentence: For the client, without its full stop; ``{param}`` stands for the field's path.
        at: The last step of that path, where the value is a field of the one that is read.
    """
    return PydanticCustomError("wire", "{sentence}", {"sentence": sentence, "at": at})


def fail_missing(at: str) -> PydanticCustomError:
    """Return what refuses an object that lacks the field `at`, as pydantic's own error for it does."""
    return PydanticCustomError("missing", "Field required", {"at": at})


def check_is_no_count(value: Any) -> Any:
    """Return chat's `logprobs`, unless it is completions' number."""
    if type(value) is int:
        raise fail("`{param}` is true or false in chat; put the number into `top_logprobs`, beside `logprobs`: true")
    return value


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def parse_prompts(value: Any) -> list[str | list[int]]:
    """Return the prompts of a completion as a list, whatever form they were sent in."""
    prompts = value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]
    if len(prompts) > MAX_PROMPTS:
        raise fail(f"`{{param}}` holds {len(prompts)} prompts, and {MAX_PROMPTS} are the most for one request")
    if not all(isinstance(prompt, str) or _is_token_ids(prompt) for prompt in prompts):
        raise fail("`{param}` must be a string, a list of token ids, or a list of such prompts")
    if any(len(prompt) == 0 for prompt in prompts):
        raise fail("`{param}` is empty; send at least one character or token id")
    return prompts


def parse_token_ids(value: Any) -> list[int]:
    """Return a list of whole numbers."""
    if not _is_token_ids(value):
        raise fail("`{param}` must be a list of token ids")
    return list(value)


def parse_stop(value: Any) -> tuple[str, ...]:
    """Return the stop strings, sent as one or as a list."""
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise fail("`{param}` must be a string or a list of strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise fail(f"`{{param}}` holds {len(stops)} strings, and {MAX_STOP_STRINGS} are the most")
    if "" in stops:
        raise fail("`{param}` holds an empty string, which would end every answer at once")
    if max(map(len, stops), default=0) > MAX_STOP_CHARS:
        raise fail(f"`{{param}}` holds a string of more than {MAX_STOP_CHARS} characters; shorten it")
    return tuple(stops)


def parse_logit_bias(value: Any) -> dict[int, float]:
    """Return token ids and what is added to their logits; JSON's keys are strings."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise fail("`{param}` must be an object that maps token ids to numbers from -100 to 100")
    if len(value) > MAX_LOGIT_BIASES:
        raise fail(f"`{{param}}` holds {len(value)} token ids, and {MAX_LOGIT_BIASES} are the most")
    for key, bias in value.items():
        if not _TOKEN_ID.fullmatch(key):
            raise fail('`{param}` has a key that is no token id; write ids as strings of digits, such as "50256"')
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise fail(f"`{{param}}` must map token id {key} to a number from -100 to 100")
    return {int(key): float(bias) for key, bias in value.items()}


def parse_content(value: Any) -> str | None:
    """Return a message's text, its parts joined in order."""
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise fail("`{param}` must be a string or a list of text parts")
    return "".join(_parse_part(part, index) for index, part in enumerate(value))


def _parse_part(part: Any, index: int) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if isinstance(part, dict) else None
    if kind not in ("text", "input_text", "output_text"):
        raise fail(f"`{{param}}` part {index} is not of type `text`, and this model reads text only")
    if not isinstance(text, str):
        raise fail(f"`{{param}}` part {index} has no string `text`")
    return text
