"""One output's text as its tokens come: detokenised, searched for stop strings, with the tokens that it is made of.

Pure: knows no request, no queue, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine_core import TokenLogprobs
from server.generation import LikelyToken, Prompt, TokenText
from server.stop_strings import StopStrings

TokenBytes = Callable[[int], bytes]


class DecodeStream(Protocol):
    """Token ids in, text out, for one request."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take more tokens; return the text that is complete."""

    def flush(self) -> str:
        """Return what is left when no more tokens come."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What some new tokens bring to the client.

    Attributes:
        text: To be shown now.
        tokens: Those whose text has begun to be shown by now; empty where logprobs are not wanted.
        stop_string: What ended the text, or None.
        num_tokens: Those that were read: after a stop string the rest is not.
    """

    text: str
    tokens: tuple[TokenText, ...] = ()
    stop_string: str | None = None
    num_tokens: int = 0


class OutputText:
    """The text of one output.

    A token is given out together with the first character of its text, so a stream's tokens and a whole answer's are
    the same, and those that lie wholly behind a stop string are never seen. What has no text of its own (a part of a
    character, a special token) goes with the character after it.

    Args:
        decoder: Of this output.
        stops: Likewise.
        token_bytes: What a token stands for.
        min_tokens: No stop string ends within so many tokens.
        shows_stop: A stop string is part of the text.
    """

    def __init__(
        self,
        decoder: DecodeStream,
        stops: StopStrings,
        *,
        token_bytes: TokenBytes,
        min_tokens: int = 0,
        shows_stop: bool = False,
    ) -> None:
        self._decoder = decoder
        self._stops = stops
        self._token_bytes = token_bytes
        self._min_tokens = min_tokens
        self._shows_stop = shows_stop
        self._num_tokens = 0
        self._num_decoded = 0  # characters
        self._num_shown = 0  # characters, never more
        self._held_tokens: deque[TokenText] = deque()

    def read(
        self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None, *, is_last: bool = False
    ) -> Piece:
        """Take new tokens.

        Args:
            token_ids: May be empty.
            logprobs: One a token, where they are wanted; there may be more, of a token that is not shown.
            is_last: Nothing follows. After a stop string was found nothing may follow either.
        """
        text, stop, num_read = "", None, 0
        # One by one: what comes of them must not depend on how many a step brought.
        for num_read, token_id in enumerate(token_ids, start=1):
            if logprobs is not None:
                entry = logprobs[num_read - 1]
                self._held_tokens.append(build_token_text(entry, self._token_bytes, offset=self._num_decoded))
            self._num_tokens += 1
            more, stop = self._search(self._decoder.feed([token_id]))
            text += more
            if stop is not None:
                break
        if is_last and stop is None:
            more, stop = self._search(self._decoder.flush())
            text += more if stop is not None else more + self._stops.flush()
        self._num_shown += len(text)
        return Piece(text, self._take_shown_tokens(is_all=is_last and stop is None), stop, num_read)

    def _search(self, text: str) -> tuple[str, str | None]:
        self._num_decoded += len(text)
        shown, stop = self._stops.feed(text, is_exempt=self._num_tokens <= self._min_tokens)
        return (shown + stop if stop is not None and self._shows_stop else shown), stop

    def _take_shown_tokens(self, *, is_all: bool) -> tuple[TokenText, ...]:
        held, taken = self._held_tokens, []
        while held and (is_all or held[0].offset < self._num_shown):
            taken.append(held.popleft())
        return tuple(taken)


def build_token_text(entry: TokenLogprobs, token_bytes: TokenBytes, *, offset: int) -> TokenText:
    """Return a token as clients may see it.

    Args:
        entry: What the engine said.
        token_bytes: What a token stands for.
        offset: Characters before it.
    """
    top = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
    return TokenText(
        token_id=entry.token_id,
        data=token_bytes(entry.token_id),
        offset=offset,
        logprob=entry.logprob,
        rank=entry.rank,
        top=tuple(LikelyToken(token_id, token_bytes(token_id), logprob) for token_id, logprob in top),
    )


def build_prompt_tokens(
    prompt: Prompt, logprobs: Sequence[TokenLogprobs], token_bytes: TokenBytes
) -> tuple[TokenText, ...]:
    """Return all tokens of a prompt; nothing predicts the first one.

    Args:
        prompt: Which.
        logprobs: From its second token on.
        token_bytes: What a token stands for.
    """
    offsets = prompt.offsets or [0] * len(prompt.token_ids)
    first = TokenText(prompt.token_ids[0], token_bytes(prompt.token_ids[0]), offsets[0])
    rest = zip(logprobs, offsets[1:], strict=True)
    return (first, *(build_token_text(entry, token_bytes, offset=offset) for entry, offset in rest))
