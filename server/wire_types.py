"""OpenAI's requests: the wire types. Pure; what becomes of a field is protocol's."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator

from server.wire_values import (
    check_is_no_count,
    fail,
    fail_missing,
    parse_content,
    parse_logit_bias,
    parse_prompts,
    parse_stop,
    parse_token_ids,
)

MAX_STOP_TOKEN_IDS = 256
MAX_LOGPROBS = 20
MAX_N = 128
MAX_CHOICES = 256
MAX_ABORTED_IDS = 1000
# Of what an operator may set while serving: above it a number is a slip of the keyboard.
MAX_LIMIT = 2**31 - 1
_MAX_SALT_CHARS = 256


class Wire(BaseModel):
    """Base of what clients send: taken as written, numbers are not strings; unknown fields are protocol's matter."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore")


class StreamOptions(Wire):
    """How a stream reports."""

    include_usage: bool | None = Field(None, description="End the stream with a chunk that tells the usage.")
    continuous_usage_stats: bool | None = Field(None, description="Tell each choice's usage in every chunk of it.")


class GenerationFields(Wire):
    """What both generating endpoints share. None = the model's or the server's default."""

    model: str | None = Field(None, description="The served model's name; may be left out.")
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = Field(
        None,
        description="Answers to each prompt, 1 to 128; each is sampled with a seed of its own.",
    )
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        None, description="0 to 2; 0 takes the likeliest token each time."
    )
    top_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Sample from the likeliest tokens whose probabilities add up to this share, 0 to 1."
    )
    top_k: Annotated[int, Field(ge=-1)] | None = Field(
        None, description="Sample from so many likeliest tokens; 0 or -1 = all."
    )
    min_p: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Sample from tokens at least this share, 0 to 1, as likely as the likeliest."
    )
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = Field(
        None, description="-2 to 2; taken off the logit of each token that the answer holds."
    )
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = Field(
        None, description="-2 to 2; taken off a token's logit once for each time that the answer holds it."
    )
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = Field(
        None,
        description="Divides positive and multiplies negative logits of tokens that prompt or answer hold; 1 = off.",
    )
    logit_bias: Annotated[dict[int, float], PlainValidator(parse_logit_bias, dict[str, float] | None)] = Field(
        default_factory=dict,
        description="Token id, as a string, to a number from -100 to 100 that is added to its logit.",
    )
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] | None = Field(
        None, description="Equal seeds draw equal random numbers, whatever else is in the batch."
    )
    stop: Annotated[tuple[str, ...], PlainValidator(parse_stop, str | list[str] | None)] = Field(
        (), description="Up to 16 texts that end the answer."
    )
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKEN_IDS)] | None = Field(
        None, description="Up to 256 token ids that end the answer."
    )
    include_stop_str_in_output: bool | None = Field(None, description="What ended the answer is a part of it.")
    min_tokens: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Nothing ends the answer before it has so many tokens, but the length limits."
    )
    ignore_eos: bool | None = Field(None, description="The model's own end tokens do not end the answer.")
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None,
        description="Tell the prompt's logprobs, with so many likeliest tokens beside each; not with `stream`.",
    )
    priority: Annotated[int, Field(ge=-(2**31), le=2**31 - 1)] | None = Field(
        None, description="Who is served first, under --scheduling-policy priority."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=_MAX_SALT_CHARS)] | None = Field(
        None, description="Share cached prefixes only with requests of the same salt."
    )
    stream: bool | None = Field(None, description="Send the answer piece by piece, as server-sent events.")
    stream_options: StreamOptions | None = Field(
        None,
        description="`include_usage` ends a stream with its usage; `continuous_usage_stats` tells it in each chunk.",
    )

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
        PlainValidator(parse_prompts, str | list[int] | list[str] | list[list[int]]),
    ] = Field(description="A text, token ids, or a list of such prompts, each of which gets answers of its own.")
    max_tokens: Annotated[int, Field(ge=0)] | None = Field(
        None, description="Tokens of each answer at most, 16 unless it says otherwise; 0 only with `echo`."
    )
    echo: bool | None = Field(None, description="The prompt stands before its answer.")
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None,
        description="Tell the answer's logprobs, with `echo` the prompt's too; so many likeliest tokens beside each.",
    )

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
    content: Annotated[str | None, PlainValidator(parse_content, str | list[dict[str, Any]] | None)] = None
    name: str | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise fail_missing("content")
        if self.reasoning and self.reasoning_content and self.reasoning != self.reasoning_content:
            raise fail("`{param}` is another name of `reasoning_content`, and the two differ; send one", at="reasoning")
        return self


class ChatRequest(GenerationFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)] = Field(
        description="The conversation; a content is a text or a list of text parts."
    )
    max_tokens: Annotated[int, Field(ge=1)] | None = Field(None, description="Older name of `max_completion_tokens`.")
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Tokens of each answer at most; what the context leaves unless it says otherwise."
    )
    logprobs: Annotated[bool | None, BeforeValidator(check_is_no_count)] = Field(
        None, description="Tell the logprobs of the answer's tokens."
    )
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = Field(
        None, description="With `logprobs`: tell so many likeliest tokens, 0 to 20, beside each of the answer."
    )

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

    model: str | None = Field(None, description="The served model's name; may be left out.")
    prompt: str | None = Field(None, description="A text.")
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = Field(None, description="Or a conversation.")
    add_special_tokens: bool | None = Field(
        None,
        description="Put BOS where the tokenizer does: for a text, not for a conversation, unless it says otherwise.",
    )
    add_generation_prompt: bool | None = Field(
        None, description="End a conversation with the opening of the assistant's turn; on unless it says otherwise."
    )
    return_token_strs: bool | None = Field(None, description="Tell each token's text too.")

    @model_validator(mode="after")
    def _check_source(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise fail("`{param}` or `messages`: send exactly one of them", at="prompt")
        return self


class DetokenizeRequest(Wire):
    """POST /detokenize."""

    model: str | None = Field(None, description="The served model's name; may be left out.")
    tokens: Annotated[list[int], PlainValidator(parse_token_ids, list[int])] = Field(description="Token ids.")


class LimitsRequest(Wire):
    """POST /admin/limits. What is left out stays as it is."""

    max_num_seqs: Annotated[int, Field(ge=1, le=MAX_LIMIT)] | None = Field(
        None, description="Requests running at once. Lowered, those that run go on; never above the start's."
    )
    max_num_batched_tokens: Annotated[int, Field(ge=1, le=MAX_LIMIT)] | None = Field(
        None, description="Tokens a step; never above the start's."
    )
    max_queued_requests: Annotated[int, Field(ge=0, le=MAX_LIMIT)] | None = Field(
        None, description="Requests that may wait beyond those that run; 0 = any number."
    )
    max_queued_tokens: Annotated[int, Field(ge=0, le=MAX_LIMIT)] | None = Field(
        None, description="Prompt tokens that may wait; 0 = any number."
    )


class AbortRequest(Wire):
    """POST /abort."""

    request_ids: Annotated[
        list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_ABORTED_IDS)
    ] = Field(description="Up to 1000 of the requests' own X-Request-Ids, or of their answers' `id`s.")
