"""What successful replies look like, as types: for the OpenAPI document, and for tests that hold replies to it.

Nothing at run time is built from these; replies.py and the routes build dicts, which cost a tenth.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Reply(BaseModel):
    model_config = ConfigDict(strict=True)


class ErrorObject(_Reply):
    """What is wrong and what to change; `code` is for programs, `param` names the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorReply(_Reply):
    """OpenAI's error body."""

    error: ErrorObject


class PromptTokensDetails(_Reply):
    """`cached_tokens`: prompt tokens found in the prefix cache."""

    cached_tokens: int


class Usage(_Reply):
    """Token counts, summed over the choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(_Reply):
    """Per token: its text, logprob, the likeliest ones, and where it starts in the choice's text."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float | None] | None]
    text_offset: list[int]


class LikelyToken(_Reply):
    """A token that might have come."""

    token: str
    logprob: float | None
    bytes: list[int]


class ChatTokenLogprob(LikelyToken):
    """A token that came, and the likeliest ones in its place."""

    top_logprobs: list[LikelyToken]


class ChatLogprobs(_Reply):
    """Logprobs of a chat answer."""

    content: list[ChatTokenLogprob]
    refusal: None


class PromptLogprob(_Reply):
    """How likely a token of the prompt was."""

    logprob: float | None
    rank: int
    decoded_token: str


# By token id; null for the first token, which nothing precedes.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(_Reply):
    """One continuation. `finish_reason` is null while a stream runs."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs | None = None


class _ReplyHead(_Reply):
    id: str
    created: int
    model: str
    system_fingerprint: str


class CompletionReply(_ReplyHead):
    """Answer of POST /v1/completions."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage


class CompletionChunk(_ReplyHead):
    """One event of its stream. The usage chunk, last before `[DONE]`, has no choices."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]
    usage: Usage | None = None


class ChatReplyMessage(_Reply):
    """What the model said."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None


class ChatChoice(_Reply):
    """One answer."""

    index: int
    message: ChatReplyMessage
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None


class ChatReply(_ReplyHead):
    """Answer of POST /v1/chat/completions."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None


class ChatDelta(_Reply):
    """What has come since the last chunk."""

    role: Literal["assistant"] | None = None
    content: str | None = None


class ChatChunkChoice(_Reply):
    """One answer's news."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: str | None
    stop_reason: str | int | None


class ChatChunk(_ReplyHead):
    """One event of a chat's stream. The usage chunk, last before `[DONE]`, has no choices."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class ModelCard(_Reply):
    """A model that is served. `max_model_len` is null until it is loaded; `parent` is what an adapter belongs to."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int | None


class ModelList(_Reply):
    """All models that are served."""

    object: Literal["list"]
    data: list[ModelCard]


class TokenizeReply(_Reply):
    """A text's tokens."""

    count: int
    max_model_len: int | None
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeReply(_Reply):
    """The text of tokens."""

    prompt: str


class RenderedRequest(_Reply):
    """What the engine would be asked, without asking it."""

    request_id: str
    model: str
    token_ids: list[int]
    prompt: str | None
    sampling_params: dict[str, Any]
    priority: int
    cache_salt: str | None
    stream: bool


class Status(_Reply):
    """What a probe is told."""

    status: str


class NotReadyReply(ErrorReply):
    """Why this server cannot be used now. `progress`, 0 to 1, is that of loading."""

    status: str
    detail: str
    progress: float


class LoadReply(_Reply):
    """Requests in hand, running or waiting."""

    server_load: int


class WorkerLoadReply(_Reply):
    """Requests in hand, running or waiting."""

    load: int


class SleepReply(_Reply):
    """Always false: this server cannot be put to sleep."""

    is_sleeping: bool


class KVBlockInfo(_Reply):
    """What vllm-router needs to place a request by its prefix. `model_path` is the name that requests use."""

    model_path: str
    instance_id: str
    kv_block_size: int


class ModelInfo(_Reply):
    """What sglang-router reads of a model. `model_path` is the name that requests use."""

    model_path: str
    is_generation: bool
    architectures: list[str]


class WorkerInfo(ModelInfo):
    """What sglang-router reads of a worker."""

    served_model_name: str
    version: str
    tp_size: int
    dp_size: int


class VersionReply(_Reply):
    """What runs here."""

    version: str
    system_fingerprint: str


class AllocatedLimits(_Reply):
    """What the server was started with; the live limits go no higher."""

    max_num_seqs: int
    max_num_batched_tokens: int


class LimitsReply(AllocatedLimits):
    """What the server takes on now, 0 = any number, and what waits: requests, one a choice, and their prompt tokens."""

    max_queued_requests: int
    max_queued_tokens: int
    allocated: AllocatedLimits
    num_requests_queued: int
    num_tokens_queued: int


class ResetReply(_Reply):
    """Whether the prefix cache was reset."""

    success: bool


class AbortReply(_Reply):
    """How many requests were ended, and which ids no request in hand has."""

    num_aborted: int
    not_found: list[str]
