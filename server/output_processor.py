"""The one loop over what an engine step brought: text, stop strings, delivery, counting. On the event loop's thread.

Every registered request ends exactly once, whoever ends it: the engine, a stop string, its client or the engine's
death. Knows no HTTP and no engine; whoever calls ``process`` carries its aborts to the engine.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence

from engine_core import EngineCoreOutput, EngineCoreOutputs, EngineDeadError, FinishReason, SchedulerStats
from server.errors import ServerStoppingError
from server.generation import GenerationOutput, GenerationRequest
from server.output_stream import OutputStream
from server.output_text import DecodeStream, OutputText, Piece, TokenBytes
from server.overload.backlog import Backlog
from server.records import RequestRecord, StepListener, StepRecord

logger = logging.getLogger(__name__)

# What a line of the token columns says beyond its token: the request goes on. One for all lines: a record a line would
# be the dearest part of the loop.
_GOES_ON = EngineCoreOutput("", [])


class _LiveRequest:
    """One registered request: its text so far, and the figures that its outputs and metrics need.

    Attributes:
        stream: What its consumer takes.
        record: Its figures.
        is_plain: A token is its text and nothing else: no stop strings, no logprobs.
    """

    def __init__(self, request: GenerationRequest, decoder: DecodeStream, token_bytes: TokenBytes) -> None:
        params = request.engine_request.sampling_params
        self.stream = OutputStream()
        self.record = request.record
        self._request = request
        self.is_plain = request.stop_strings.is_empty and params.num_logprobs is None
        self._feed = decoder.feed
        self._text = OutputText(
            decoder,
            request.stop_strings.fork(),
            token_bytes=token_bytes,
            min_tokens=params.min_tokens,
            shows_stop=request.shows_stop,
        )

    def advance(self, token_ids: list[int], output: EngineCoreOutput) -> GenerationOutput:
        """Turn what the engine said into what the client gets; it may end earlier than the engine's does.

        Args:
            token_ids: The new tokens.
            output: Everything else.
        """
        record, reason = self.record, output.finish_reason
        record.num_cached_tokens = max(record.num_cached_tokens, output.num_cached_tokens)
        if output.first_scheduled_time is not None:
            record.first_scheduled_time = output.first_scheduled_time
        if self._request.is_prompt_only and reason in (FinishReason.STOP, FinishReason.LENGTH):
            return self._build(Piece(""), FinishReason.LENGTH, None, output)
        piece = self._text.read(self._shown(token_ids, output), output.logprobs, is_last=reason is not None)
        if piece.stop_string is not None:
            record.num_output_tokens += piece.num_tokens
            return self._build(piece, FinishReason.STOP, piece.stop_string, output)
        record.num_output_tokens += len(token_ids)
        return self._build(piece, reason, output.stop_token_id, output)

    def advance_plain(self, token_id: int) -> GenerationOutput:
        """Do the same with one token that says nothing else, for requests that are plain."""
        record = self.record
        text = self._feed((token_id,))
        record.num_output_tokens = num_tokens = record.num_output_tokens + 1
        return GenerationOutput(text, num_tokens, None, None, record.num_cached_tokens)

    def _shown(self, token_ids: list[int], output: EngineCoreOutput) -> list[int]:
        if output.finish_reason is not FinishReason.STOP:
            return token_ids
        # The stopping token is counted but not shown (scheduler.md U6), unless the client named it and wants to see it.
        is_wanted = self._request.shows_stop and output.stop_token_id is not None
        return token_ids if is_wanted else token_ids[:-1]

    def _build(
        self, piece: Piece, reason: FinishReason | None, stop_reason: str | int | None, output: EngineCoreOutput
    ) -> GenerationOutput:
        return GenerationOutput(
            text=piece.text,
            num_output_tokens=self.record.num_output_tokens,
            finish_reason=reason,
            stop_reason=stop_reason,
            num_cached_tokens=self.record.num_cached_tokens,
            error=output.error if reason is FinishReason.ERROR else None,
            tokens=piece.tokens,
            prompt_logprobs=output.prompt_logprobs,
        )


class OutputProcessor:
    """Owns the live requests' text and queues.

    Args:
        new_decode_stream: Makes a request's decoder, given its prompt's token ids.
        token_bytes: What a token stands for, for those who ask for logprobs.
        metrics: Gets one record a step.
        clock: Seconds, the one that ``arrival_time`` is on.

    Attributes:
        backlog: Told of each step.
    """

    def __init__(
        self,
        *,
        new_decode_stream: Callable[[Sequence[int]], DecodeStream],
        token_bytes: TokenBytes,
        metrics: StepListener,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._new_decode_stream = new_decode_stream
        self._token_bytes = token_bytes
        self._metrics = metrics
        self._clock = clock
        self.backlog = Backlog()
        self._live: dict[str, _LiveRequest] = {}
        self._engine_error: str | None = None

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return len(self._live)

    def get_record(self, request_id: str) -> RequestRecord | None:
        """Return the figures of a live request; None where there is none of that id."""
        live = self._live.get(request_id)
        return None if live is None else live.record

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
        decoder = self._new_decode_stream(request.engine_request.prompt_token_ids)
        live = _LiveRequest(request, decoder, self._token_bytes)
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
        for request_id, time_s in outputs.preemptions:
            if request_id in self._live:
                self._live[request_id].record.note_preemption(time_s)
        for output in outputs.outputs:
            if self._deliver(output.request_id, output.new_token_ids, output, now, record):
                to_abort.append(output.request_id)
        live_requests = self._live
        for request_id, token_id in zip(outputs.token_req_ids, outputs.token_ids, strict=True):
            live = live_requests.get(request_id)
            if live is not None and live.is_plain:  # nearly every token of nearly every request
                is_over = self._deliver_plain(live, token_id, now, record)
            else:
                is_over = self._deliver(request_id, [token_id], _GOES_ON, now, record)
            if is_over:
                to_abort.append(request_id)
        self.backlog.note_step(outputs, record.ended, now)
        stats = outputs.stats
        if outputs.engine_error is not None:
            self._engine_error = outputs.engine_error
            message = outputs.engine_error
            self._fail(list(self._live), lambda: EngineDeadError(message), FinishReason.ERROR, record)
            stats = SchedulerStats()
        self._metrics.record_step(record, stats)
        return to_abort

    def fail_all(self, reason: str, kind: type[Exception] = ServerStoppingError) -> list[str]:
        """End every live request with an exception that says ``reason``; return their ids, to be aborted."""
        request_ids, record = list(self._live), StepRecord()
        self._fail(request_ids, lambda: kind(reason), FinishReason.ABORT, record)
        self._metrics.record_step(record, None)
        return request_ids

    def fail(self, request_ids: Collection[str], error: Exception) -> list[str]:
        """End those of these requests that are live with an error; return their ids, to be aborted."""
        live_ids, record = [each for each in request_ids if each in self._live], StepRecord()
        self._fail(live_ids, lambda: error, FinishReason.ABORT, record)
        self._metrics.record_step(record, None)
        return live_ids

    def _deliver(
        self, request_id: str, token_ids: list[int], output: EngineCoreOutput, now: float, record: StepRecord
    ) -> bool:
        """Returns whether the request ended here but not in the engine."""
        live = self._live.get(request_id)
        if live is None:
            return False
        num_before = live.record.num_output_tokens
        try:
            generated = live.advance(token_ids, output)
        except Exception:  # the tokenizer's, and it may cost nobody else their step
            generated = _build_failure(live.record)
        if token_ids:
            self._count_tokens(live.record, live.record.num_output_tokens - num_before, now, record)
        live.stream.put(generated)
        if generated.finish_reason is None:
            return False
        self._end(request_id, generated.finish_reason, now, record)
        return output.finish_reason is None

    def _deliver_plain(self, live: _LiveRequest, token_id: int, now: float, record: StepRecord) -> bool:
        """_deliver, of a line for a request that is plain."""
        try:
            generated = live.advance_plain(token_id)
        except Exception:
            live.stream.put(_build_failure(live.record))
            self._end(live.record.request_id, FinishReason.ERROR, now, record)
            return True
        self._count_tokens(live.record, 1, now, record)
        live.stream.put(generated)
        return False

    def _count_tokens(self, request: RequestRecord, num_tokens: int, now: float, step: StepRecord) -> None:
        step.num_generation_tokens += num_tokens
        if request.last_token_time is None:
            request.first_token_time = now
            step.started.append(request)
        else:
            gap_s = now - request.last_token_time
            step.token_gap_s.append(gap_s)
            request.gaps.add(gap_s)
        request.last_token_time = now

    def _fail(
        self, request_ids: list[str], new_error: Callable[[], Exception], reason: FinishReason, record: StepRecord
    ) -> None:
        now = self._clock()
        for request_id in request_ids:
            self._live[request_id].stream.fail(new_error())
            self._end(request_id, reason, now, record)

    def _end(self, request_id: str, reason: FinishReason, now: float, record: StepRecord) -> None:
        ended = self._live.pop(request_id).record
        ended.finish_reason, ended.end_time = reason, now
        record.ended.append(ended)


def _build_failure(record: RequestRecord) -> GenerationOutput:
    """Return the end of a request whose tokens cannot be turned into text; call where the reason is being handled."""
    logger.exception("request %s: its tokens could not be turned into text", record.request_id)
    return GenerationOutput(
        text="",
        num_output_tokens=record.num_output_tokens,
        finish_reason=FinishReason.ERROR,
        error="The tokens of this request could not be turned into text.",
    )
