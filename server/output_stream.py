"""What one consumer still has to take of one request. On the event loop's thread."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from server.generation import GenerationOutput, TokenText


class OutputStream:
    """At most one output, however slow the consumer is.

    Outputs that are not taken in time are merged: their texts and tokens joined, everything else from the latest. So
    memory per request is bounded by its text, and a consumer that fell behind catches up in one step.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._tokens: list[TokenText] = []
        self._prompt_tokens: tuple[TokenText, ...] = ()
        self._latest: GenerationOutput | None = None
        self._error: Exception | None = None
        self._is_ended = False
        self._has_news = asyncio.Event()

    def put(self, output: GenerationOutput) -> None:
        """Add an output; after one with a finish_reason nothing may follow."""
        assert not self._is_ended, "a request ends once"
        self._texts.append(output.text)
        self._tokens += output.tokens
        self._prompt_tokens = self._prompt_tokens or output.prompt_tokens
        self._latest = output
        self._is_ended = output.finish_reason is not None
        self._has_news.set()

    def fail(self, error: Exception) -> None:
        """End with an exception, raised once all that came before it has been taken."""
        assert not self._is_ended, "a request ends once"
        self._error = error
        self._is_ended = True
        self._has_news.set()

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> GenerationOutput:
        while self._latest is None:
            if self._error is not None:
                raise self._error
            if self._is_ended:
                raise StopAsyncIteration
            self._has_news.clear()
            await self._has_news.wait()
        return self._take(self._latest)

    def _take(self, latest: GenerationOutput) -> GenerationOutput:
        merged = replace(
            latest, text="".join(self._texts), tokens=tuple(self._tokens), prompt_tokens=self._prompt_tokens
        )
        self._latest, self._prompt_tokens = None, ()
        self._texts.clear()
        self._tokens.clear()
        return merged
