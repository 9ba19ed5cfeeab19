"""OpenAI's requests: ONE table of every field that this server knows and how it treats it, and the parsing by it.

Pure: values in, frozen wire types or RequestError out. The types are wire_types', the shapes of answers replies'.
"""

from __future__ import annotations

import difflib
import enum
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from server.errors import ErrorKind, RequestError
from server.wire_types import (
    AbortRequest,
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    LimitsRequest,
    StreamOptions,
    TokenizeRequest,
    Wire,
)

_MAX_SHOWN_CHARS = 60
# Where pydantic's own words would speak of Python.
_MUST = {
    "too_short": "hold at least one item",
    "too_long": "hold at most {max_length} items",
    "model_type": "be an object",
    "list_type": "be a list",
}
# What other endpoints and servers call a field, where the nearest name would be another one or none.
_OUR_NAMES = {
    **dict.fromkeys(("max_completion_tokens", "num_predict", "n_predict"), "max_tokens"),
    **dict.fromkeys(("messages", "text"), "prompt"),
    "prompt": "messages",
}


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
    *("separate_reasoning", "stream_reasoning"),
)
_UNSUPPORTED_NAMES = (
    *("prompt_embeds", "logprob_token_ids", "truncate_prompt_tokens", "truncation_side"),
    *("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("grammar", "json_schema", "regex", "ebnf", "thinking_token_budget", "repetition_detection"),
    *("kv_transfer_params", "ec_transfer_params", "vllm_xargs", "mm_processor_kwargs", "lora_path"),
)

SHARED_FIELDS: FieldTable = {
    **dict.fromkeys(_INERT_NAMES, _INERT),
    **dict.fromkeys(_UNSUPPORTED_NAMES, _UNSUPPORTED),
    "store": _unless(False),
    "best_of": _unless(1),
    "no_stop_trim": _unless(False),
    "return_hidden_states": _unless(False),
    "repeat_penalty": _unless(1),
    "length_penalty": _unless(1),
    "use_beam_search": _unless(False),
    "typical_p": _unless(1),
    "allowed_token_ids": _unless(),
    "bad_words": _unless([]),
    "logits_processors": _unless([]),
    "response_format": _unless({"type": "text"}),
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
    "suffix": _unless(""),
    "add_special_tokens": _unless(True),
}
CHAT_FIELDS: FieldTable = {
    **SHARED_FIELDS,
    **_honoured(ChatRequest),
    "echo": _unless(False),
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
}
MESSAGE_FIELDS: FieldTable = {
    **_honoured(ChatMessage),
    "annotations": _INERT,
    "refusal": _unless(""),
    "audio": _UNSUPPORTED,
    "tool_calls": _unless([]),
    "function_call": _UNSUPPORTED,
}

TOKENIZE_FIELDS: FieldTable = {
    **_honoured(TokenizeRequest),
    **{name: CHAT_FIELDS[name] for name in ("tools", "documents", "chat_template", "chat_template_kwargs")},
    "continue_final_message": CHAT_FIELDS["continue_final_message"],
}
DETOKENIZE_FIELDS: FieldTable = _honoured(DetokenizeRequest)

W = TypeVar("W", bound=Wire)
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
    return _parse(ChatRequest, CHAT_FIELDS, value, _FieldCheck(is_strict, on_unknown))


def parse_tokenize(value: Any, *, is_strict: bool, on_unknown: OnUnknown) -> TokenizeRequest:
    """Turn a decoded body into a tokenize request; arguments and errors as for parse_completion."""
    return _parse(TokenizeRequest, TOKENIZE_FIELDS, value, _FieldCheck(is_strict, on_unknown))


def parse_detokenize(value: Any, *, is_strict: bool, on_unknown: OnUnknown) -> DetokenizeRequest:
    """Turn a decoded body into a detokenize request; arguments and errors as for parse_completion."""
    return _parse(DetokenizeRequest, DETOKENIZE_FIELDS, value, _FieldCheck(is_strict, on_unknown))


def parse_limits(value: Any, *, is_strict: bool, on_unknown: OnUnknown) -> LimitsRequest:
    """Turn a decoded body into a change of limits. A misspelt one is always refused: the operator counts on it."""
    return _parse(LimitsRequest, _honoured(LimitsRequest), value, _FieldCheck(True, on_unknown))


def parse_abort(value: Any, *, is_strict: bool, on_unknown: OnUnknown) -> AbortRequest:
    """Turn a decoded body into a request to end others; arguments and errors as for parse_limits."""
    return _parse(AbortRequest, _honoured(AbortRequest), value, _FieldCheck(True, on_unknown))


@dataclass(frozen=True, slots=True)
class _FieldCheck:
    is_strict: bool
    on_unknown: OnUnknown

    def run(self, value: dict[str, Any], table: FieldTable, prefix: str = "") -> None:
        for name, item in value.items():
            rule = table.get(name)
            if rule is None and item is None:
                continue  # as if it had been left out
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
        near = _find_nearest(name, table)
        hint = f"did you mean `{near}`?" if near else "leave it out."
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
    if value.get("stream_options") is not None and "stream_options" in table:
        check.run(value["stream_options"], STREAM_OPTIONS_FIELDS, "stream_options.")
    if value.get("messages") is not None and "messages" in table:
        for index, message in enumerate(value["messages"]):
            check.run(message, MESSAGE_FIELDS, f"messages[{index}].")
    return request


def _find_nearest(name: str, table: FieldTable) -> str | None:
    if _OUR_NAMES.get(name) in table:
        return _OUR_NAMES[name]
    return next(iter(difflib.get_close_matches(name[:_MAX_SHOWN_CHARS], table, n=1)), None)


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
    must = _MUST.get(first["type"], first["msg"].partition(" should ")[2]).format_map(context)
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
