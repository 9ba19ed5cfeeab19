"""OpenAI's requests: the wire types, and how each value is read. Pure; what becomes of a field is protocol's."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator
from pydantic_core import PydanticCustomError

MAX_STOP_STRINGS = 16
# Their automaton takes 1.3 us and 300 bytes a character: 5 ms and 1.2 MB at most.
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_LOGIT_BIASES = 1024
MAX_LOGPROBS = 20
MAX_N = 128
MAX_PROMPTS = 256
MAX_CHOICES = 256
_MAX_SALT_CHARS = 256
_TOKEN_ID = re.compile("[0-9]{1,10}", re.ASCII)


def fail(sentence: str, *, at: str | None = None) -> PydanticCustomError:
    """Return what refuses a value.

    Args:
        sentence: For the client, without its full stop; ``{param}`` stands for the field's path.
        at: The last step of that path, where the value is a field of the one that is read.
    """
    return PydanticCustomError("wire", "{sentence}", {"sentence": sentence, "at": at})


def _is_token_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int for item in value)


def _parse_prompts(value: Any) -> list[str | list[int]]:
    prompts = value if isinstance(value, list) and value and not isinstance(value[0], int) else [value]
    if len(prompts) > MAX_PROMPTS:
        raise fail(f"`{{param}}` holds {len(prompts)} prompts, and {MAX_PROMPTS} are the most for one request")
    if not all(isinstance(prompt, str) or _is_token_ids(prompt) for prompt in prompts):
        raise fail("`{param}` must be a string, a list of token ids, or a list of such prompts")
    if any(len(prompt) == 0 for prompt in prompts):
        raise fail("`{param}` is empty; send at least one character or token id")
    return prompts


def _parse_token_ids(value: Any) -> list[int]:
    if not _is_token_ids(value):
        raise fail("`{param}` must be a list of token ids")
    return list(value)


def _parse_stop(value: Any) -> tuple[str, ...]:
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


def _parse_logit_bias(value: Any) -> dict[int, float]:
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


def _parse_content(value: Any) -> str | None:
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


class Wire(BaseModel):
    """Base of what clients send: taken as written, numbers are not strings; unknown fields are protocol's matter."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class StreamOptions(Wire):
    """How a stream reports."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationFields(Wire):
    """What both generating endpoints share. None = the model's or the server's default."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[int, float], PlainValidator(_parse_logit_bias, dict[str, float] | None)] = Field(
        default_factory=dict
    )
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_parse_stop, str | list[str] | None)] = ()
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = None
    include_stop_str_in_output: bool | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=_MAX_SALT_CHARS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise fail("`{param}` has a meaning only with `stream`: true", at="stream_options")
        if self.has_continuous_usage and not self.has_stream_usage:
            sentence = "`{param}` with `continuous_usage_stats` has a meaning only with `include_usage`: true"
            raise fail(sentence, at="stream_options")
        if self.prompt_logprobs is not None and self.stream:
            raise fail("`{param}` cannot be streamed; leave out `stream`", at="prompt_logprobs")
        return self

    @property
    def has_stream_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def has_continuous_usage(self) -> bool:
        """Whether every chunk of the stream tells its choice's usage."""
        return bool(self.stream_options and self.stream_options.continuous_usage_stats)

    @property
    def num_logprobs(self) -> int | None:
        """How many likeliest tokens are told beside each one of the output; None = no logprobs at all."""
        raise NotImplementedError

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same of the prompt."""
        return self.prompt_logprobs


class CompletionRequest(GenerationFields):
    """POST /v1/completions. `prompt` is a list of prompts, whatever form it was sent in."""

    prompt: Annotated[
        list[str | list[int]],
        PlainValidator(_parse_prompts, str | list[int] | list[str] | list[list[int]]),
    ]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_counts(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise fail("`{param}` may be 0 only with `echo`: true; ask for at least 1 token", at="max_tokens")
        num_choices = len(self.prompt) * (self.n or 1)
        if num_choices > MAX_CHOICES:
            raise fail(
                f"`{{param}}` times the number of prompts makes {num_choices} answers, and {MAX_CHOICES} are the most "
                "for one request",
                at="n",
            )
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        if self.prompt_logprobs is not None or not self.echo:
            return self.prompt_logprobs
        return self.logprobs


class ChatMessage(Wire):
    """One message. `content` is text, its parts joined in order."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str | None, PlainValidator(_parse_content, str | list[dict[str, Any]] | None)] = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise fail("`{param}` is required", at="content")
        return self


class ChatRequest(GenerationFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise fail("`{param}` has a meaning only with `logprobs`: true", at="top_logprobs")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None


class TokenizeRequest(Wire):
    """POST /tokenize: a text, or messages through the chat template."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise fail("`{param}` or `messages`: send exactly one of them", at="prompt")
        return self


class DetokenizeRequest(Wire):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], PlainValidator(_parse_token_ids, list[int])]
