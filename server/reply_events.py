"""Replies as streams of events: what each output adds, told in bytes. Knows no connection.

The work done here is done once a token.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from server.engine_client import EngineClient
from server.generation import GenerationOutput, GenerationRequest
from server.replies import Choice, ReplyShape, create_choices
from server.sse import DONE, TextEvent, build_event
from server.streaming import IndexedOutputs, check_success, generate_all


def build_events(
    engine_client: EngineClient, requests: Sequence[GenerationRequest], shape: ReplyShape, *, has_usage: bool
) -> AsyncGenerator[bytes, None]:
    """Run requests and yield their event stream, ``[DONE]`` included; errors as collect_choices."""
    build = _build_events_of_one if len(requests) == 1 else _build_events_of_many
    return build(engine_client, requests, shape, has_usage=has_usage)


async def _build_events_of_one(
    engine_client: EngineClient, requests: Sequence[GenerationRequest], shape: ReplyShape, *, has_usage: bool
) -> AsyncGenerator[bytes, None]:
    # Without the layers that others need: each costs every token.
    choices = create_choices(requests)
    teller = _Teller(shape, 0, choices[0])
    has_prompts = _has_prompt_logprobs(requests)
    async with aclosing(engine_client.generate(requests[0])) as outputs:
        async for output in outputs:
            if output.finish_reason is not None:
                check_success(output)
            events = await teller.tell_beside(output) if has_prompts else teller.tell(output)
            if events:
                yield events
    if has_usage:
        yield build_event(shape.build_usage_chunk(choices))
    yield DONE


async def _build_events_of_many(
    engine_client: EngineClient, requests: Sequence[GenerationRequest], shape: ReplyShape, *, has_usage: bool
) -> AsyncGenerator[bytes, None]:
    choices = create_choices(requests)
    tellers = [_Teller(shape, index, choice) for index, choice in enumerate(choices)]
    has_prompts = _has_prompt_logprobs(requests)
    async with aclosing(generate_all(engine_client, requests)) as outputs:
        async for index, output in _hold_followers(outputs, choices) if has_prompts else outputs:
            teller = tellers[index]
            events = await teller.tell_beside(output) if has_prompts else teller.tell(output)
            if events:
                yield events
    if has_usage:
        yield build_event(shape.build_usage_chunk(choices))
    yield DONE


def _has_prompt_logprobs(requests: Sequence[GenerationRequest]) -> bool:
    return requests[0].engine_request.sampling_params.num_prompt_logprobs is not None


class _Teller:
    """Tells one choice's outputs as events."""

    def __init__(self, shape: ReplyShape, index: int, choice: Choice) -> None:
        self._shape = shape
        self._index = index
        self._choice = choice
        self._text_event: TextEvent | None = None
        self._is_first = True

    def tell(self, output: GenerationOutput) -> bytes:
        """Return the events of the next output; may be none."""
        if self._text_event is not None and output.finish_reason is None:
            return self._text_event.build(output.text) if output.text else b""
        self._choice.note(output)
        chunks = self._shape.build_chunks(self._index, self._choice, output, is_first=self._is_first)
        if self._is_first and output.finish_reason is None and self._shape.tells_text_only:
            self._text_event = self._build_text_event()
        self._is_first = False
        return b"".join(map(build_event, chunks))

    async def tell_beside(self, output: GenerationOutput) -> bytes:
        """Do the same, the first time in a thread: a prompt's logprobs can be many."""
        return await asyncio.to_thread(self.tell, output) if self._is_first else self.tell(output)

    def _build_text_event(self) -> TextEvent:
        sample = GenerationOutput(TextEvent.PLACEHOLDER, self._choice.num_output_tokens)
        (chunk,) = self._shape.build_chunks(self._index, self._choice, sample, is_first=False)
        return TextEvent(chunk)


async def _hold_followers(outputs: IndexedOutputs, choices: Sequence[Choice]) -> IndexedOutputs:
    """Hold a choice's outputs back until its prompt's first choice, which brings the prompt's logprobs, has spoken."""
    held: list[tuple[int, GenerationOutput]] = []
    async for index, output in outputs:
        leader = choices[index].leader
        if leader is not None and leader.prompt_logprobs is None:
            held.append((index, output))
            continue
        yield index, output
        if leader is None and held:
            follows = [choices[each].leader is choices[index] for each, _ in held]
            released = [item for item, is_free in zip(held, follows, strict=True) if is_free]
            held = [item for item, is_free in zip(held, follows, strict=True) if not is_free]
            for item in released:
                yield item
