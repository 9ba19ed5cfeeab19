"""Token ids to text, piece by piece, in complete characters only. Pure: knows no request and no stop string."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

DecodeIds = Callable[[list[int]], str]

REPLACEMENT = "\ufffd"
_MAX_CONTEXT_TOKENS = 64
# Prompt tokens that the first piece is decoded after, so that it keeps its leading space.
_NUM_CONTEXT_TOKENS = 6
# A character spans at most 4 byte tokens, an incomplete one 3.
_MAX_PART_TOKENS = 3
# A longer undecodable run is garbage, and is shown as such.
_MAX_PENDING_TOKENS = 64


class OwnTexts(dict[int, str | None]):
    """Token id -> its text, for tokens that say the same wherever they stand; None for parts of characters.

    Filled as tokens come. Only for decoders that join the bytes of their tokens: there, complete characters are all
    that a token needs to stand alone.

    Args:
        decode: As IncrementalDetokenizer's.
    """

    def __init__(self, decode: DecodeIds) -> None:
        super().__init__()
        self._decode = decode

    def __missing__(self, token_id: int) -> str | None:
        text = self._decode([token_id])
        self[token_id] = own = None if REPLACEMENT in text else text
        return own


class IncrementalDetokenizer:
    """One output's text as its tokens come.

    What a token means can depend on its neighbours: a character may span several, and some decoders drop a leading
    space. So new tokens are decoded behind the last ones shown, and what the last ones alone decode to is cut off:

        context (shown) | pending (new)      text = decode(context + pending)[len(decode(context)):]

    Args:
        decode: Ids to text, with special tokens skipped and U+FFFD where bytes are no character.
        prompt_token_ids: The prompt; its end is context, never output.
        own_texts: See OwnTexts; none where a token's text depends on the one before it. With them most tokens cost a
            look-up, 0.2 us instead of 6, and the context never matters.

    Source: the prefix and read offsets of text-generation-inference's ``decode_token``.
    """

    def __init__(
        self,
        decode: DecodeIds,
        prompt_token_ids: Sequence[int] = (),
        *,
        own_texts: Mapping[int, str | None] | None = None,
    ) -> None:
        self._decode = decode
        self._own_texts = own_texts
        self._context = _take_context(decode, prompt_token_ids)
        self._context_text = decode(self._context) if self._context else ""
        self._pending: list[int] = []
        self._num_shown = 0  # characters of the pending tokens' text

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take new tokens and return the text that is certain now; may be empty."""
        if len(token_ids) == 1:
            return self._feed_one(token_ids[0])
        # One by one: a stray byte spoils complete characters that are decoded with it, so what a client reads would
        # depend on how many tokens a step brought.
        return "".join(map(self._feed_one, token_ids))

    def flush(self) -> str:
        """Return what is left at the end of the output, U+FFFD where a character stayed incomplete."""
        return self._commit(self._pending_text()) if self._pending else ""

    def _feed_one(self, token_id: int) -> str:
        if self._own_texts is not None and not self._pending:
            own = self._own_texts[token_id]
            if own is not None:
                return own
        self._pending.append(token_id)
        text = self._pending_text()
        stable = text.rstrip(REPLACEMENT)
        if len(stable) == len(text) or len(self._pending) > _MAX_PENDING_TOKENS:
            return self._commit(text)
        new = stable[self._num_shown :]
        self._num_shown = max(self._num_shown, len(stable))
        return new

    def _pending_text(self) -> str:
        text = self._decode(self._context + self._pending)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        # An incomplete character changed how the text before it decodes (byte fallback does that): leave that out.
        return self._decode(self._pending)

    def _commit(self, text: str) -> str:
        new = text[self._num_shown :]
        self._num_shown = 0
        if text:
            self._context = self._pending
        elif len(self._context) < _MAX_CONTEXT_TOKENS:
            # Special tokens are no context, yet a first space that was dropped is: keep both, and what was before.
            self._context = self._context + self._pending
        self._context_text = self._decode(self._context)
        self._pending = []
        return new


def _take_context(decode: DecodeIds, prompt_token_ids: Sequence[int]) -> list[int]:
    """Return the prompt's last tokens, without parts of characters at either end.

    Byte fallback shows a whole run of bytes as U+FFFD where one of them is stray, and the output may continue the run.
    """
    last = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
    if REPLACEMENT not in decode(last):
        return last
    for at_end, at_start in itertools.product(range(_MAX_PART_TOKENS + 1), repeat=2):
        context = last[at_start : len(last) - at_end]
        text = decode(context)
        if text and text.strip(REPLACEMENT) == text:
            return context
    return last
