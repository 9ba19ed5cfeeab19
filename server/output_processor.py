"""The one loop over what an engine step brought: text, stop strings, delivery, counting. On the event loop's thread.

Every registered request ends exactly once, whoever ends it: the engine, a stop string, its client or the engine's
death. Knows no HTTP and no engine; whoever calls ``process`` carries its aborts to the engine.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from engine_core import EngineCoreOutput, EngineCoreOutputs, EngineDeadError, FinishReason, SchedulerStats
from server.generation import GenerationOutput, GenerationRequest, ServerStoppingError
from server.metrics import RequestRecord, ServerMetrics, StepRecord

logger = logging.getLogger(__name__)

# What a line of the token columns says beyond its token: the request goes on. One for all lines: a record a line would
# be the dearest part of the loop.
_GOES_ON = EngineCoreOutput("", [])


class DecodeStream(Protocol):
    """Token ids in, text out, for one request."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Take more tokens; return the text that is complete."""

    def flush(self) -> str:
        """Return what is left when no more tokens come."""


class OutputStream:
    """What one consumer still has to take: at most one output, however slow it is.

    Outputs that are not taken in time are merged: their texts joined, everything else from the latest. So memory per
    request is bounded by its text, and a consumer that fell behind catches up in one step.
    """

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._latest: GenerationOutput | None = None
        self._error: Exception | None = None
        self._is_ended = False
        self._has_news = asyncio.Event()

    def put(self, output: GenerationOutput) -> None:
        """Add an output; after one with a finish_reason nothing may follow."""
        assert not self._is_ended, "a request ends once"
        self._texts.append(output.text)
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
        merged = replace(self._latest, text="".join(self._texts))
        self._latest = None
        self._texts.clear()
        return merged


class _LiveRequest:
    """One registered request: its decoding state and the figures that its outputs and metrics need."""

    def __init__(self, request: GenerationRequest, decoder: DecodeStream) -> None:
        engine_request = request.engine_request
        self.stream = OutputStream()
        self.record = RequestRecord(
            request_id=engine_request.request_id,
            arrival_time=engine_request.arrival_time,
            num_prompt_tokens=request.num_prompt_tokens,
            max_tokens=engine_request.sampling_params.max_tokens,
        )
        self._decoder = decoder
        self._stops = request.stop_strings.fork()

    def advance(self, token_ids: list[int], output: EngineCoreOutput) -> GenerationOutput:
        """Turn what the engine said into what the client gets; it may end earlier than the engine's does.

        Args:
            token_ids: The new tokens.
            output: Everything else.
        """
        record = self.record
        record.num_output_tokens += len(token_ids)
        record.num_cached_tokens = max(record.num_cached_tokens, output.num_cached_tokens)
        if output.first_scheduled_time is not None:
            record.first_scheduled_time = output.first_scheduled_time
        text, stop_string = self._read(token_ids, output)
        reason: FinishReason | None = output.finish_reason
        stop_reason: str | int | None = output.stop_token_id
        if stop_string is not None:
            reason, stop_reason = FinishReason.STOP, stop_string
        return GenerationOutput(
            text=text,
            num_output_tokens=record.num_output_tokens,
            finish_reason=reason,
            stop_reason=stop_reason,
            num_cached_tokens=record.num_cached_tokens,
            error=output.error if reason is FinishReason.ERROR else None,
        )

    def _read(self, token_ids: list[int], output: EngineCoreOutput) -> tuple[str, str | None]:
        if output.finish_reason is FinishReason.STOP:
            token_ids = token_ids[:-1]  # the stopping token is counted but not shown (scheduler.md U6)
        text = self._decoder.feed(token_ids) if token_ids else ""
        if output.finish_reason is not None:
            text += self._decoder.flush()
        shown, stop_string = self._stops.feed(text)
        if output.finish_reason is not None and stop_string is None:
            shown += self._stops.flush()
        return shown, stop_string


class OutputProcessor:
    """Owns the live requests' text and queues.

    Args:
        new_decode_stream: Makes a request's decoder, given its prompt's token ids.
        metrics: Gets one record a step.
        clock: Seconds, the one that ``arrival_time`` is on.
    """

    def __init__(
        self,
        *,
        new_decode_stream: Callable[[Sequence[int]], DecodeStream],
        metrics: ServerMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._new_decode_stream = new_decode_stream
        self._metrics = metrics
        self._clock = clock
        self._live: dict[str, _LiveRequest] = {}
        self._engine_error: str | None = None

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def add(self, request: GenerationRequest) -> OutputStream:
        """Register a request, before the engine hears of it.

        Raises:
            EngineDeadError: The engine has died.
            ValueError: Its id is that of a live request.
        """
        if self._engine_error is not None:
            raise EngineDeadError(self._engine_error)
        request_id = request.engine_request.request_id
        if request_id in self._live:
            raise ValueError(f"request id {request_id!r} is in use")
        live = _LiveRequest(request, self._new_decode_stream(request.engine_request.prompt_token_ids))
        self._live[request_id] = live
        return live.stream

    def discard(self, request_id: str) -> bool:
        """Forget a request whose consumer has left. Returns whether it was live, hence is to be aborted."""
        if request_id not in self._live:
            return False
        record = StepRecord()
        self._end(request_id, FinishReason.ABORT, self._clock(), record)
        self._metrics.record_step(record, None)
        return True

    def process(self, outputs: EngineCoreOutputs) -> list[str]:
        """Take what one step brought and deliver it.

        Returns:
            The ids of requests that ended here though the engine goes on with them: to be aborted there.
        """
        now, record, to_abort = self._clock(), StepRecord(), []
        for output in outputs.outputs:
            if self._deliver(output.request_id, output.new_token_ids, output, now, record):
                to_abort.append(output.request_id)
        for request_id, token_id in zip(outputs.token_req_ids, outputs.token_ids, strict=True):
            if self._deliver(request_id, [token_id], _GOES_ON, now, record):
                to_abort.append(request_id)
        stats = outputs.stats
        if outputs.engine_error is not None:
            self._engine_error = outputs.engine_error
            self._fail_all(EngineDeadError, outputs.engine_error, FinishReason.ERROR, record)
            stats = SchedulerStats()
        self._metrics.record_step(record, stats)
        return to_abort

    def fail_all(self, reason: str) -> list[str]:
        """End every live request with a ServerStoppingError that says ``reason``; return their ids, to be aborted."""
        request_ids, record = list(self._live), StepRecord()
        self._fail_all(ServerStoppingError, reason, FinishReason.ABORT, record)
        self._metrics.record_step(record, None)
        return request_ids

    def _deliver(
        self, request_id: str, token_ids: list[int], output: EngineCoreOutput, now: float, record: StepRecord
    ) -> bool:
        """Returns whether the request ended here but not in the engine."""
        live = self._live.get(request_id)
        if live is None:
            return False
        try:
            generated = live.advance(token_ids, output)
        except BaseException:  # a panic in the tokenizer's Rust is no Exception, and may cost nobody else their step
            logger.exception("request %s: its tokens could not be turned into text", request_id)
            generated = GenerationOutput(
                text="",
                num_output_tokens=live.record.num_output_tokens,
                finish_reason=FinishReason.ERROR,
                error="The tokens of this request could not be turned into text.",
            )
        if token_ids:
            self._count_tokens(live.record, len(token_ids), now, record)
        live.stream.put(generated)
        if generated.finish_reason is None:
            return False
        self._end(request_id, generated.finish_reason, now, record)
        return output.finish_reason is None

    def _count_tokens(self, request: RequestRecord, num_tokens: int, now: float, step: StepRecord) -> None:
        step.num_generation_tokens += num_tokens
        if request.last_token_time is None:
            request.first_token_time = now
            step.started.append(request)
        else:
            step.token_gap_s.append(now - request.last_token_time)
        request.last_token_time = now

    def _fail_all(self, kind: type[Exception], message: str, reason: FinishReason, record: StepRecord) -> None:
        now = self._clock()
        for request_id in list(self._live):
            self._live[request_id].stream.fail(kind(message))
            self._end(request_id, reason, now, record)

    def _end(self, request_id: str, reason: FinishReason, now: float, record: StepRecord) -> None:
        ended = self._live.pop(request_id).record
        ended.finish_reason, ended.end_time = reason, now
        record.ended.append(ended)
