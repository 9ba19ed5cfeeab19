"""What one consumer still has to take of one request. On the event loop's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

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
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: GenerationOutput) -> None:
        """Add an output; after one with a finish_reason nothing may follow."""
        assert not self._is_ended, "a request ends once"
        if self._latest is not None:
            self._merge(self._latest, output)
        self._latest = output
        self._is_ended = output.finish_reason is not None
        if self._waiter is not None:
            self._wake_up()

    def fail(self, error: Exception) -> None:
        """End with an exception, raised once all that came before it has been taken."""
        assert not self._is_ended, "a request ends once"
        self._error = error
        self._is_ended = True
        self._wake_up()

    def __aiter__(self) -> OutputStream:
        return self

    async def __anext__(self) -> GenerationOutput:
        while self._latest is None:
            if self._error is not None:
                raise self._error
            if self._is_ended:
                raise StopAsyncIteration
            # A bare future: an asyncio.Event costs twice as much, and there is one consumer.
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._take(self._latest)

    def _wake_up(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # a consumer that leaves cancels it
            waiter.set_result(None)

    def _merge(self, untaken: GenerationOutput, output: GenerationOutput) -> None:
        if not self._texts:
            self._add(untaken)
        self._add(output)

    def _add(self, output: GenerationOutput) -> None:
        self._texts.append(output.text)
        self._tokens += output.tokens
        if output.prompt_logprobs is not None:
            self._prompt_logprobs = output.prompt_logprobs

    def _take(self, latest: GenerationOutput) -> GenerationOutput:
        self._latest = None
        if not self._texts:
            return latest
        merged = latest._replace(
            text="".join(self._texts), tokens=tuple(self._tokens), prompt_logprobs=self._prompt_logprobs
        )
        self._prompt_logprobs = None
        self._texts.clear()
        self._tokens.clear()
        return merged
