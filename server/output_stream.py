"""What one consumer still has to take of one request. On the event loop's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from engine_core import TokenLogprobs
from server.generation import GenerationOutput, TokenText


class OutputStream:
    """At most one output, however slow the consumer is.

    Outputs that are not taken in time are merged: their texts and tokens joined, everything else from the latest. So
    memory per request is bounded by its text, and a consumer that fell behind catches up in one step.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._tokens: list[TokenText] = []
        self._prompt_logprobs: Sequence[TokenLogprobs] | None = None
        self._latest: GenerationOutput | None = None
        self._error: Exception | None = None
        self._is_ended = False
        self._has_news = asyncio.Event()

    def put(self, output: GenerationOutput) -> None:
        """Add an output; after one with a finish_reason nothing may follow."""
        assert not self._is_ended, "a request ends once"
        self._texts.append(output.text)
        self._tokens += output.tokens
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs
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
            latest, text="".join(self._texts), tokens=tuple(self._tokens), prompt_logprobs=self._prompt_logprobs
        )
        self._latest, self._prompt_logprobs = None, None
        self._texts.clear()
        self._tokens.clear()
        return merged
