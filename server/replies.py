"""OpenAI's replies: the dicts of whole answers and of stream chunks. Pure; the other half of protocol.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from engine_core import TokenLogprobs
from server.generation import GenerationOutput, GenerationRequest, TokenText
from server.logprob_replies import (
    build_chat_logprobs,
    build_completion_logprobs,
    build_prompt_logprobs,
    join_completion_logprobs,
)
from server.output_text import TokenBytes, build_prompt_tokens


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What every piece of one reply repeats.

    Attributes:
        id: Shown to the client.
        created: Unix time in seconds.
        model: The name it is served under.
        system_fingerprint: Names what computed it.
    """

    id: str
    created: int
    model: str
    system_fingerprint: str


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """What the client wants to see.

    Attributes:
        echo: The prompt before its continuation.
        has_logprobs: The output's logprobs, and the prompt's where it is echoed.
        has_prompt_logprobs: The prompt's in a field of their own.
        has_usage: The stream ends with a usage chunk, so the others say ``usage: null``.
        has_continuous_usage: They say their choice's usage instead.
    """

    echo: bool = False
    has_logprobs: bool = False
    has_prompt_logprobs: bool = False
    has_usage: bool = False
    has_continuous_usage: bool = False

    @property
    def tells_text_only(self) -> bool:
        """See ReplyShape."""
        return not (self.has_logprobs or self.has_prompt_logprobs or self.has_continuous_usage)


@dataclass(slots=True)
class Choice:
    """One answer to one prompt, summed up from its outputs.

    Attributes:
        request: What it answers.
        leader: The first choice of its prompt, perhaps itself: the one that is told the prompt's logprobs.
        texts: All text so far, in pieces.
        tokens: All tokens so far, where logprobs were asked for.
        prompt_logprobs: The prompt's, where they were asked for and have come; the leader's only.
        num_output_tokens: Sampled so far.
        num_cached_tokens: Prompt tokens from the prefix cache.
        finish_reason: None while it runs.
        stop_reason: The stop string or token id that ended it.
    """

    request: GenerationRequest
    leader: Choice | None = None
    texts: list[str] = field(default_factory=list)
    tokens: list[TokenText] = field(default_factory=list)
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, output: GenerationOutput) -> None:
        """Take in the next output."""
        self.texts.append(output.text)
        self.tokens += output.tokens
        self.note(output)

    def note(self, output: GenerationOutput) -> None:
        """Take in the next output without its text and tokens."""
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = output.prompt_logprobs
        self.num_output_tokens = output.num_output_tokens
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.finish_reason = output.finish_reason.value if output.finish_reason else None
        self.stop_reason = output.stop_reason


def create_choices(requests: Sequence[GenerationRequest]) -> list[Choice]:
    """Return an empty choice for each request, the choices of one prompt tied to its first."""
    choices: list[Choice] = []
    for request in requests:
        leader = choices[-request.choice] if request.choice else None
        choices.append(Choice(request, leader))
    return choices


def build_usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the token counts of a whole reply, the same streamed or not. A prompt counts once, however many choices.

    Args:
        choices: All of them, or the one of which a chunk tells.
    """
    # Of a prompt's choices the one that comes first here speaks for it.
    leaders = {id(choice.request.prompt): choice for choice in reversed(choices)}.values()
    num_prompt_tokens = sum(choice.request.num_prompt_tokens for choice in leaders)
    num_output_tokens = sum(choice.num_output_tokens for choice in choices)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in leaders)},
    }


class ReplyShape(Protocol):
    """How one endpoint's replies look."""

    @property
    def tells_text_only(self) -> bool:
        """Whether a chunk between a choice's first and last output tells its text and nothing else that changes."""

    def build_reply(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the whole answer."""

    def build_chunks(
        self, index: int, choice: Choice, output: GenerationOutput, *, is_first: bool
    ) -> list[dict[str, Any]]:
        """Return the chunks that tell one output of one choice; may be none.

        Args:
            index: Of the choice.
            choice: Its figures, this output's included.
            output: What to tell.
            is_first: It is the choice's first.
        """

    def build_usage_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the chunk without choices that ends a stream with usage."""


class _PromptTokens:
    """The tokens of prompts whose logprobs are told, made once a prompt. They can be many: not for the event loop."""

    def __init__(self, token_bytes: TokenBytes) -> None:
        self._token_bytes = token_bytes
        self._by_leader: dict[int, tuple[TokenText, ...]] = {}

    def get(self, choice: Choice) -> tuple[TokenText, ...]:
        """Return those of a choice's prompt; none where their logprobs have not come."""
        leader = choice.leader or choice
        if leader.prompt_logprobs is None:
            return ()
        if id(leader) not in self._by_leader:
            tokens = build_prompt_tokens(leader.request.prompt, leader.prompt_logprobs, self._token_bytes)
            self._by_leader[id(leader)] = tokens
        return self._by_leader[id(leader)]


class CompletionShape:
    """Replies of /v1/completions.

    Args:
        head: What every piece repeats.
        options: What the client wants to see.
        token_bytes: What a token stands for.
    """

    def __init__(self, head: ReplyHead, options: ReplyOptions, token_bytes: TokenBytes) -> None:
        self._base = _build_base(head, "text_completion")
        self._options = options
        self._prompt_tokens = _PromptTokens(token_bytes)

    @property
    def tells_text_only(self) -> bool:
        return self._options.tells_text_only

    def build_reply(self, choices: Sequence[Choice]) -> dict[str, Any]:
        built = [self._build_whole(index, choice) for index, choice in enumerate(choices)]
        return {**self._base, "choices": built, "usage": build_usage(choices)}

    def build_chunks(
        self, index: int, choice: Choice, output: GenerationOutput, *, is_first: bool
    ) -> list[dict[str, Any]]:
        if not (output.text or output.tokens or output.finish_reason or is_first):
            return []
        echoed = self._echo(choice) if is_first else ""
        built = {
            "index": index,
            "text": echoed + output.text,
            "logprobs": self._build_logprobs(choice, output.tokens, has_prompt=is_first),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        return [{**self._base, "choices": [built], **_build_chunk_usage(self._options, choice)}]

    def build_usage_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {**self._base, "choices": [], "usage": build_usage(choices)}

    def _build_whole(self, index: int, choice: Choice) -> dict[str, Any]:
        built = {
            "index": index,
            "text": self._echo(choice) + "".join(choice.texts),
            "logprobs": self._build_logprobs(choice, choice.tokens, has_prompt=True),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._options.has_prompt_logprobs:
            built["prompt_logprobs"] = build_prompt_logprobs(self._prompt_tokens.get(choice))
        return built

    def _echo(self, choice: Choice) -> str:
        return (choice.request.prompt.text or "") if self._options.echo else ""

    def _build_logprobs(
        self, choice: Choice, tokens: Sequence[TokenText], *, has_prompt: bool
    ) -> dict[str, Any] | None:
        if not self._options.has_logprobs:
            return None
        own = build_completion_logprobs(tokens, base_offset=len(self._echo(choice)))
        if not (self._options.echo and has_prompt):
            return own
        return join_completion_logprobs(build_completion_logprobs(self._prompt_tokens.get(choice)), own)


class ChatShape:
    """Replies of /v1/chat/completions; arguments as for CompletionShape."""

    def __init__(self, head: ReplyHead, options: ReplyOptions, token_bytes: TokenBytes) -> None:
        self._base = _build_base(head, "chat.completion")
        self._stream_base = _build_base(head, "chat.completion.chunk")
        self._options = options
        self._prompt_tokens = _PromptTokens(token_bytes)

    @property
    def tells_text_only(self) -> bool:
        return self._options.tells_text_only

    def build_reply(self, choices: Sequence[Choice]) -> dict[str, Any]:
        built = [
            {
                "index": index,
                "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
                "logprobs": self._build_logprobs(choice.tokens),
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for index, choice in enumerate(choices)
        ]
        reply = {**self._base, "choices": built, "usage": build_usage(choices)}
        if self._options.has_prompt_logprobs:
            reply["prompt_logprobs"] = build_prompt_logprobs(self._prompt_tokens.get(choices[0]))
        return reply

    def build_chunks(
        self, index: int, choice: Choice, output: GenerationOutput, *, is_first: bool
    ) -> list[dict[str, Any]]:
        chunks = []
        if is_first:
            chunks.append(self._build_chunk(index, choice, {"role": "assistant", "content": ""}))
        if output.text or output.tokens:
            logprobs = self._build_logprobs(output.tokens)
            chunks.append(self._build_chunk(index, choice, {"content": output.text}, logprobs=logprobs))
        if output.finish_reason:
            chunks.append(self._build_chunk(index, choice, {}, is_last=True))
        return chunks

    def build_usage_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {**self._stream_base, "choices": [], "usage": build_usage(choices)}

    def _build_chunk(
        self,
        index: int,
        choice: Choice,
        delta: dict[str, str],
        *,
        logprobs: dict[str, Any] | None = None,
        is_last: bool = False,
    ) -> dict[str, Any]:
        built = {
            "index": index,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason if is_last else None,
            "stop_reason": choice.stop_reason if is_last else None,
        }
        return {**self._stream_base, "choices": [built], **_build_chunk_usage(self._options, choice)}

    def _build_logprobs(self, tokens: Sequence[TokenText]) -> dict[str, Any] | None:
        return build_chat_logprobs(tokens) if self._options.has_logprobs else None


def _build_base(head: ReplyHead, kind: str) -> dict[str, Any]:
    return {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.system_fingerprint,
    }


def _build_chunk_usage(options: ReplyOptions, choice: Choice) -> dict[str, Any]:
    if options.has_continuous_usage:
        return {"usage": build_usage([choice])}
    return {"usage": None} if options.has_usage else {}
