"""OpenAI's requests: wire types, and ONE table of every field that this server knows and how it treats it.

Pure. With replies.py the only place that knows OpenAI's field names; values in, frozen wire types or RequestError out.
"""

from __future__ import annotations

import difflib
import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from server.errors import ErrorKind, RequestError

MAX_STOP_STRINGS = 16
# Their automaton takes 1.3 us and 300 bytes a character: 5 ms and 1.2 MB at most.
MAX_STOP_CHARS = 256
MAX_PROMPTS = 256
_MAX_SHOWN_CHARS = 60
# Where pydantic's own words would speak of Python.
_MUST = {"too_short": "hold at least one item", "model_type": "be an object", "list_type": "be a list"}


def _fail(sentence: str, *, at: str | None = None) -> PydanticCustomError:
    # `{param}` is filled in by _as_request_error, which knows the path; `at` is the last step of it.
    return PydanticCustomError("wire", "{sentence}", {"sentence": sentence, "at": at})


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _parse_prompts(value: Any) -> list[str | list[int]]:
    prompts = value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]
    if len(prompts) > MAX_PROMPTS:
        raise _fail(f"`{{param}}` holds {len(prompts)} prompts, and {MAX_PROMPTS} are the most for one request")
    if not all(isinstance(prompt, str) or _is_token_ids(prompt) for prompt in prompts):
        raise _fail("`{param}` must be a string, a list of token ids, or a list of such prompts")
    if any(len(prompt) == 0 for prompt in prompts):
        raise _fail("`{param}` is empty; send at least one character or token id")
    return prompts


def _parse_stop(value: Any) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _fail("`{param}` must be a string or a list of strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise _fail(f"`{{param}}` holds {len(stops)} strings, and {MAX_STOP_STRINGS} are the most")
    if "" in stops:
        raise _fail("`{param}` holds an empty string, which would end every answer at once")
    if max(map(len, stops), default=0) > MAX_STOP_CHARS:
        raise _fail(f"`{{param}}` holds a string of more than {MAX_STOP_CHARS} characters; shorten it")
    return tuple(stops)


def _parse_content(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _fail("`{param}` must be a string or a list of text parts")
    return "".join(_parse_part(part, index) for index, part in enumerate(value))


def _parse_part(part: Any, index: int) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if isinstance(part, dict) else None
    if kind not in ("text", "input_text", "output_text"):
        raise _fail(f"`{{param}}` part {index} is not of type `text`, and this model reads text only")
    if not isinstance(text, str):
        raise _fail(f"`{{param}}` part {index} has no string `text`")
    return text


class _Wire(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class StreamOptions(_Wire):
    """How a stream reports."""

    include_usage: bool | None = None


class GenerationFields(_Wire):
    """What both endpoints share. None = the model's or the server's default."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_parse_stop, str | list[str] | None)] = ()
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise _fail("`{param}` has a meaning only with `stream`: true", at="stream_options")
        return self

    @property
    def has_stream_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)


class CompletionRequest(GenerationFields):
    """POST /v1/completions. `prompt` is a list of prompts, whatever form it was sent in."""

    prompt: Annotated[
        list[str | list[int]],
        PlainValidator(_parse_prompts, str | list[int] | list[str] | list[list[int]]),
    ]


class ChatMessage(_Wire):
    """One message. `content` is text, its parts joined in order."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, PlainValidator(_parse_content, str | list[dict[str, Any]] | None)] = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise _fail("`{param}` is required", at="content")
        return self


class ChatRequest(GenerationFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None


class Treatment(enum.StrEnum):
    """What becomes of a known field."""

    HONOURED = "honoured"
    INERT = "inert"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class FieldRule:
    """One row of a table of fields.

    Attributes:
        treatment: What becomes of it.
        no_ops: Of a refused one: the values that change nothing and are therefore taken. null always is.
    """

    treatment: Treatment
    no_ops: tuple[Any, ...] = ()


FieldTable = Mapping[str, FieldRule]

_INERT = FieldRule(Treatment.INERT)
_UNSUPPORTED = FieldRule(Treatment.REFUSED)


def _honoured(wire_type: type[BaseModel]) -> dict[str, FieldRule]:
    return dict.fromkeys(wire_type.model_fields, FieldRule(Treatment.HONOURED))


def _unless(*no_ops: Any) -> FieldRule:
    return FieldRule(Treatment.REFUSED, no_ops)


_INERT_NAMES = (
    # OpenAI's, then what routers and other clients add.
    *("user", "metadata", "service_tier", "prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    *("verbosity", "prediction", "parallel_tool_calls"),
    *("request_id", "rid", "session_id", "cache_prompt", "litellm_call_id", "litellm_metadata", "include_reasoning"),
)
_UNSUPPORTED_NAMES = (
    *("prompt_logprobs", "prompt_embeds", "logprob_token_ids", "truncate_prompt_tokens", "truncation_side"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("grammar", "json_schema", "regex", "ebnf", "thinking_token_budget", "repetition_detection", "cache_salt"),
    *("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "mm_processor_kwargs", "lora_path"),
)

SHARED_FIELDS: FieldTable = {
    **dict.fromkeys(_INERT_NAMES, _INERT),
    **dict.fromkeys(_UNSUPPORTED_NAMES, _UNSUPPORTED),
    "store": _unless(False),
    "n": _unless(1),
    "best_of": _unless(1),
    "echo": _unless(False),
    "frequency_penalty": _unless(0),
    "presence_penalty": _unless(0),
    "repetition_penalty": _unless(1),
    "repeat_penalty": _unless(1),
    "length_penalty": _unless(1),
    "use_beam_search": _unless(False),
    "min_p": _unless(0),
    "typical_p": _unless(1),
    "min_tokens": _unless(0),
    "logit_bias": _unless({}),
    "allowed_token_ids": _unless(),
    "bad_words": _unless([]),
    "logits_processors": _unless([]),
    "response_format": _unless({"type": "text"}),
    "include_stop_str_in_output": _unless(False),
    "skip_special_tokens": _unless(True),
    "spaces_between_special_tokens": _unless(True),
    "stream_interval": _unless(1),
    "return_token_ids": _unless(False),
    "return_tokens_as_token_ids": _unless(False),
    "return_prompt_text": _unless(False),
}
COMPLETION_FIELDS: FieldTable = {
    **SHARED_FIELDS,
    **_honoured(CompletionRequest),
    "logprobs": _unless(False),
    "suffix": _unless(""),
    "add_special_tokens": _unless(True),
}
CHAT_FIELDS: FieldTable = {
    **SHARED_FIELDS,
    **_honoured(ChatRequest),
    "logprobs": _unless(False),
    "top_logprobs": _unless(0),
    "tools": _unless([]),
    "tool_choice": _unless("none", "auto"),
    "functions": _unless([]),
    "function_call": _unless("none", "auto"),
    "modalities": _unless(["text"], []),
    "audio": _UNSUPPORTED,
    "web_search_options": _UNSUPPORTED,
    "reasoning_effort": _unless("none"),
    "add_special_tokens": _unless(False),
    "add_generation_prompt": _unless(True),
    "continue_final_message": _unless(False),
    "chat_template": _UNSUPPORTED,
    "chat_template_kwargs": _unless({}),
    "documents": _unless([]),
}
STREAM_OPTIONS_FIELDS: FieldTable = {
    **_honoured(StreamOptions),
    "include_obfuscation": _INERT,
    "continuous_usage_stats": _unless(False),
}
MESSAGE_FIELDS: FieldTable = {
    **_honoured(ChatMessage),
    "reasoning": _INERT,
    "annotations": _INERT,
    "refusal": _unless(""),
    "audio": _UNSUPPORTED,
    "tool_calls": _unless([]),
    "function_call": _UNSUPPORTED,
}

W = TypeVar("W", bound=GenerationFields)
OnUnknown = Callable[[str], None]


def parse_completion(value: Any, *, is_strict: bool, on_unknown: OnUnknown) -> CompletionRequest:
    """Turn a decoded body into a completion request.

    Args:
        value: The decoded JSON.
        is_strict: Refuse unknown fields.
        on_unknown: Told the name of each field that no table has, unless they are refused.

    Raises:
        RequestError: A field is missing, malformed, out of range, not supported, or unknown under `is_strict`.
    """
    return _parse(CompletionRequest, COMPLETION_FIELDS, value, _FieldCheck(is_strict, on_unknown))


def parse_chat(value: Any, *, is_strict: bool, on_unknown: OnUnknown) -> ChatRequest:
    """Turn a decoded body into a chat request; arguments and errors as for parse_completion."""
    check = _FieldCheck(is_strict, on_unknown)
    request = _parse(ChatRequest, CHAT_FIELDS, value, check)
    for index, message in enumerate(value["messages"]):
        check.run(message, MESSAGE_FIELDS, f"messages[{index}].")
    return request


@dataclass(frozen=True, slots=True)
class _FieldCheck:
    is_strict: bool
    on_unknown: OnUnknown

    def run(self, value: dict[str, Any], table: FieldTable, prefix: str = "") -> None:
        for name, item in value.items():
            rule = table.get(name)
            if rule is None:
                self._meet_unknown(name, table, prefix)
            elif rule.treatment is Treatment.REFUSED and not _is_no_op(item, rule):
                raise RequestError(
                    f"`{prefix}{_shorten(name)}` is not supported yet; {_advise(rule)}.",
                    kind=ErrorKind.UNSUPPORTED_PARAMETER,
                    param=prefix + name,
                )

    def _meet_unknown(self, name: str, table: FieldTable, prefix: str) -> None:
        if not self.is_strict:
            # Without indices: one name, one warning.
            self.on_unknown(prefix.split("[")[0] + ("." if "[" in prefix else "") + name if prefix else name)
            return
        near = difflib.get_close_matches(name[:_MAX_SHOWN_CHARS], table, n=1)
        hint = f"did you mean `{near[0]}`?" if near else "leave it out."
        raise RequestError(
            f"`{prefix}{_shorten(name)}` is not a field of this endpoint; {hint}",
            kind=ErrorKind.UNKNOWN_PARAMETER,
            param=prefix + _shorten(name),
        )


def _parse(wire_type: type[W], table: FieldTable, value: Any, check: _FieldCheck) -> W:
    if not isinstance(value, dict):
        raise RequestError("The body must be a JSON object.", kind=ErrorKind.MALFORMED_BODY)
    check.run(value, table)
    try:
        request = wire_type.model_validate(value)
    except ValidationError as error:
        raise _as_request_error(error) from None
    if request.stream_options is not None:
        check.run(value["stream_options"], STREAM_OPTIONS_FIELDS, "stream_options.")
    return request


def _is_no_op(value: Any, rule: FieldRule) -> bool:
    # bool is an int to Python, but `n: true` is not `n: 1`.
    is_bool = isinstance(value, bool)
    return value is None or any(value == no_op and is_bool == isinstance(no_op, bool) for no_op in rule.no_ops)


def _advise(rule: FieldRule) -> str:
    if not rule.no_ops:
        return "leave it out"
    return f"leave it out or send {json.dumps(rule.no_ops[0])}"


def _as_request_error(error: ValidationError) -> RequestError:
    first = error.errors(include_url=False)[0]
    context = first.get("ctx", {})
    steps = [*first["loc"], *([context["at"]] if context.get("at") else [])]
    param = _join_steps([step for step in steps if isinstance(step, int) or step.isidentifier()])
    if first["type"] == "missing":
        return RequestError(f"`{param}` is required.", kind=ErrorKind.MISSING_PARAMETER, param=param)
    if first["type"] == "wire":
        sentence = context["sentence"].replace("{param}", param)
        return RequestError(f"{sentence}.", kind=ErrorKind.INVALID_VALUE, param=param)
    must = _MUST.get(first["type"], first["msg"].removeprefix("Input should "))
    return RequestError(
        f"`{param}` must {must}, not {_shorten(_show(first['input']))}.", kind=ErrorKind.INVALID_VALUE, param=param
    )


def _join_steps(steps: list[int | str]) -> str:
    joined = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps)
    return joined.removeprefix(".")


def _show(value: Any) -> str:
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    return json.dumps(value, ensure_ascii=False)


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_SHOWN_CHARS else text[:_MAX_SHOWN_CHARS] + "…"
