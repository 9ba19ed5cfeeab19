"""OpenAI's replies: the dicts of whole answers and of stream chunks. Pure; the other half of protocol.py."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from server.generation import GenerationOutput


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


@dataclass(slots=True)
class Choice:
    """One prompt's answer, summed up from its outputs.

    Attributes:
        num_prompt_tokens: Of its prompt.
        text: All text so far.
        num_output_tokens: Sampled so far.
        num_cached_tokens: Prompt tokens from the prefix cache.
        finish_reason: None while it runs.
        stop_reason: The stop string or token id that ended it.
    """

    num_prompt_tokens: int
    text: str = ""
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, output: GenerationOutput) -> None:
        """Take in the next output."""
        self.text += output.text
        self.note(output)

    def note(self, output: GenerationOutput) -> None:
        """Take in the next output's figures without its text."""
        self.num_output_tokens = output.num_output_tokens
        self.num_cached_tokens = max(self.num_cached_tokens, output.num_cached_tokens)
        self.finish_reason = output.finish_reason.value if output.finish_reason else None
        self.stop_reason = output.stop_reason


def build_usage(choices: Sequence[Choice]) -> dict[str, Any]:
    """Return the token counts of a whole reply; the same figures streamed or not."""
    num_prompt_tokens = sum(choice.num_prompt_tokens for choice in choices)
    num_output_tokens = sum(choice.num_output_tokens for choice in choices)
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": num_output_tokens,
        "total_tokens": num_prompt_tokens + num_output_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in choices)},
    }


class ReplyShape(Protocol):
    """How one endpoint's replies look."""

    def build_reply(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the whole answer."""

    def build_chunks(self, index: int, output: GenerationOutput, *, is_first: bool) -> list[dict[str, Any]]:
        """Return the chunks that tell one output of one choice; may be none."""

    def build_usage_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the chunk without choices that ends a stream with usage."""


class CompletionShape:
    """Replies of /v1/completions.

    Args:
        head: What every piece repeats.
        has_usage: The stream ends with a usage chunk, so the others say ``usage: null``.
    """

    def __init__(self, head: ReplyHead, *, has_usage: bool = False) -> None:
        self._base = _build_base(head, "text_completion")
        self._chunk_base = {**self._base, "usage": None} if has_usage else self._base

    def build_reply(self, choices: Sequence[Choice]) -> dict[str, Any]:
        built = [
            _build_text_choice(index, choice.text, choice.finish_reason, choice.stop_reason)
            for index, choice in enumerate(choices)
        ]
        return {**self._base, "choices": built, "usage": build_usage(choices)}

    def build_chunks(self, index: int, output: GenerationOutput, *, is_first: bool) -> list[dict[str, Any]]:
        if not (output.text or output.finish_reason or is_first):
            return []
        choice = _build_text_choice(index, output.text, output.finish_reason, output.stop_reason)
        return [{**self._chunk_base, "choices": [choice]}]

    def build_usage_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {**self._base, "choices": [], "usage": build_usage(choices)}


class ChatShape:
    """Replies of /v1/chat/completions; arguments as for CompletionShape."""

    def __init__(self, head: ReplyHead, *, has_usage: bool = False) -> None:
        self._base = _build_base(head, "chat.completion")
        self._stream_base = _build_base(head, "chat.completion.chunk")
        self._chunk_base = {**self._stream_base, "usage": None} if has_usage else self._stream_base

    def build_reply(self, choices: Sequence[Choice]) -> dict[str, Any]:
        built = [
            {
                "index": index,
                "message": {"role": "assistant", "content": choice.text, "refusal": None},
                "logprobs": None,
                "finish_reason": choice.finish_reason,
                "stop_reason": choice.stop_reason,
            }
            for index, choice in enumerate(choices)
        ]
        return {**self._base, "choices": built, "usage": build_usage(choices)}

    def build_chunks(self, index: int, output: GenerationOutput, *, is_first: bool) -> list[dict[str, Any]]:
        chunks = []
        if is_first:
            chunks.append(self._build_chunk(index, {"role": "assistant", "content": ""}))
        if output.text:
            chunks.append(self._build_chunk(index, {"content": output.text}))
        if output.finish_reason:
            chunks.append(self._build_chunk(index, {}, output.finish_reason, output.stop_reason))
        return chunks

    def build_usage_chunk(self, choices: Sequence[Choice]) -> dict[str, Any]:
        return {**self._stream_base, "choices": [], "usage": build_usage(choices)}

    def _build_chunk(
        self, index: int, delta: dict[str, str], finish_reason: str | None = None, stop_reason: str | int | None = None
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": None,
            "finish_reason": finish_reason,
            "stop_reason": stop_reason,
        }
        return {**self._chunk_base, "choices": [choice]}


def _build_base(head: ReplyHead, kind: str) -> dict[str, Any]:
    return {
        "id": head.id,
        "object": kind,
        "created": head.created,
        "model": head.model,
        "system_fingerprint": head.system_fingerprint,
    }


def _build_text_choice(
    index: int, text: str, finish_reason: str | None, stop_reason: str | int | None
) -> dict[str, Any]:
    return {
        "index": index,
        "text": text,
        "logprobs": None,
        "finish_reason": finish_reason,
        "stop_reason": stop_reason,
    }
