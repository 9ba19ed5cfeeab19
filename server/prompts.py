"""Prompts: text, ids or messages become token ids. Knows no engine, no HTTP and no threads.

What it refuses is a RequestError all the same.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from server.chat_template import ChatTemplateError
from server.errors import ErrorKind, RequestError
from server.generation import Prompt
from server.template_budget import TemplateLimitError
from server.wire_types import ChatMessage

# JSON has numbers of thousands of digits.
_MAX_SHOWN_DIGITS = 40
# To name the message that a template refuses, conversations are rendered again up to this length.
_MAX_OFFENDER_RENDERS = 64
# Prompts up to so long are made on the event loop: tokenising one takes a fifth of a millisecond at most, a thread's
# help about as long, and every stream waits for the interpreter meanwhile.
MAX_INLINE_CHARS = 1000
# A conversation of that length takes a tenth of a millisecond.
_SLOW_RENDER_S = 0.02


class TextTokenizer(Protocol):
    """What prompts need of a tokenizer; called from several threads."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the text's token ids."""

    def encode_with_offsets(self, text: str, add_special_tokens: bool) -> tuple[list[int], list[int]]:
        """Return the text's token ids, and for each the number of characters before it."""

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the whole text of some ids."""

    def decode_with_offsets(self, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        """Return the text of some ids, special tokens spelt out, and for each the number of characters before it."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one token stands for."""


class Template(Protocol):
    """What prompts need of a chat template; called from several threads."""

    def render(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the prompt's text.

        Raises:
            ChatTemplateError: The template refuses these messages.
        """


class PromptBuilder:
    """Makes prompts. Every method may take long for a long text; call it on a PromptThreads.

    Args:
        tokenizer: The model's.
        chat_template: The model's, None where it has none.
        vocab_size: Of the model; its tokenizer may know ids beyond, which the model cannot take.

    Attributes:
        tokenizer: As given.
        has_slow_template: A short conversation has taken so long to render that none should be on the event loop.
    """

    def __init__(self, *, tokenizer: TextTokenizer, chat_template: Template | None, vocab_size: int) -> None:
        self.tokenizer = tokenizer
        self.has_slow_template = False
        self._chat_template = chat_template
        self._vocab_size = vocab_size

    def build_from_text(
        self, text: str, *, has_text: bool = False, has_offsets: bool = False, add_special_tokens: bool = True
    ) -> Prompt:
        """Tokenise a plain prompt.

        Args:
            text: What was sent.
            has_text: Keep the text.
            has_offsets: Keep where each token begins.
            add_special_tokens: Put BOS where this tokenizer does.
        """
        if has_offsets:
            token_ids, offsets = self.tokenizer.encode_with_offsets(text, add_special_tokens)
            return Prompt(token_ids, text, offsets)
        return Prompt(self.tokenizer.encode(text, add_special_tokens), text if has_text else None)

    def build_from_ids(self, token_ids: list[int], *, has_text: bool = False, has_offsets: bool = False) -> Prompt:
        """Take a prompt that was sent as ids, known to be in range; arguments as build_from_text."""
        if has_offsets:
            text, offsets = self.tokenizer.decode_with_offsets(token_ids)
            return Prompt(token_ids, text, offsets)
        return Prompt(token_ids, self.tokenizer.decode(token_ids, skip_special_tokens=False) if has_text else None)

    def build_from_messages(
        self,
        messages: Sequence[ChatMessage],
        *,
        add_generation_prompt: bool = True,
        add_special_tokens: bool = False,
    ) -> Prompt:
        """Render a conversation and tokenise it. The template writes the special tokens itself.

        Raises:
            RequestError: There is no template, or it refuses the messages.
        """
        template = self.get_template()
        shown = [_build_template_message(message) for message in messages]
        started = time.thread_time()
        try:
            text = template.render(shown, add_generation_prompt=add_generation_prompt)
        except ChatTemplateError as error:
            # What takes too long is not tried again, message by message.
            is_limit = isinstance(error, TemplateLimitError)
            self.has_slow_template |= is_limit
            param = "messages" if is_limit else _find_offender(template, shown, str(error))
            raise RequestError(str(error), kind=ErrorKind.INVALID_VALUE, param=param) from None
        finally:
            # A long conversation may take long, and would not be on the event loop.
            if time.thread_time() - started > _SLOW_RENDER_S and count_chars(messages) <= MAX_INLINE_CHARS:
                self.has_slow_template = True
        return Prompt(self.tokenizer.encode(text, add_special_tokens), text)

    def get_template(self) -> Template:
        """Return the chat template.

        Raises:
            RequestError: There is none.
        """
        if self._chat_template is None:
            raise RequestError(
                "This model has no chat template, so it cannot chat; use /v1/completions.",
                kind=ErrorKind.INVALID_VALUE,
                param="messages",
            )
        return self._chat_template

    def check_ids(self, token_ids: Sequence[int], *, param: str) -> None:
        """Check that the model knows these ids: the one place for all fields that hold some.

        Raises:
            RequestError: One of them is out of range.
        """
        vocab_size = self._vocab_size
        for token_id in token_ids:
            if not 0 <= token_id < vocab_size:
                raise RequestError(
                    f"`{param}` holds the token id {show_number(token_id)}, but this model's ids run from 0 to "
                    f"{vocab_size - 1}.",
                    kind=ErrorKind.INVALID_VALUE,
                    param=param,
                )


def count_chars(messages: Sequence[ChatMessage]) -> int:
    """Return how much text a conversation holds."""
    return sum(len(text) for message in messages for text in _build_template_message(message).values())


def show_number(number: int) -> str:
    """Return a number as a message may hold it: of an absurd one the beginning."""
    shown = str(number)
    return shown if len(shown) <= _MAX_SHOWN_DIGITS else shown[:_MAX_SHOWN_DIGITS] + "…"


def _find_offender(template: Template, messages: list[dict[str, str]], sentence: str) -> str:
    """Name the message that a template refuses: the last one of the shortest conversation that it refuses so."""
    for num_messages in range(1, min(len(messages), _MAX_OFFENDER_RENDERS) + 1):
        try:
            template.render(messages[:num_messages], add_generation_prompt=True)
        except ChatTemplateError as error:
            if str(error) == sentence:
                return f"messages[{num_messages - 1}]"
    return "messages"


def _build_template_message(message: ChatMessage) -> dict[str, str]:
    fields = {
        "role": message.role,
        "content": message.content or "",
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content or message.reasoning,
    }
    return {name: value for name, value in fields.items() if value is not None}
