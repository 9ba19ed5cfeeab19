"""An engine that does what a test says, and decoders whose tokens are characters: token id = code point."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from engine_core import (
    EngineCommand,
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineDeadError,
    EngineFailure,
    EnginePhase,
    EngineSnapshot,
    EngineState,
    FinishReason,
    SamplingParams,
    SchedulerStats,
)
from server.engine_api import OnState, Publish
from server.generation import GenerationRequest, Prompt
from server.stop_strings import StopStrings

READY = EngineState(EnginePhase.READY, "", 1.0, num_blocks=100, block_size=16, max_model_len=1024)


class CharDecodeStream:
    """Each token is the character with that code point; those above the Unicode range fail."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self.prompt_token_ids = prompt_token_ids

    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join(map(chr, token_ids))

    def flush(self) -> str:
        return ""


class HoldingDecodeStream(CharDecodeStream):
    """Shows every character one token late, as a decoder waiting for the rest of a character does."""

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        super().__init__(prompt_token_ids)
        self._held = ""

    def feed(self, token_ids: Sequence[int]) -> str:
        text = self._held + super().feed(token_ids)
        self._held = text[-1:]
        return text[:-1]

    def flush(self) -> str:
        held, self._held = self._held, ""
        return held


class FakeEngine:
    """Records what it is told; ``step``, ``die`` and ``set_state`` speak in the engine's stead."""

    def __init__(self, publish: Publish, on_state: OnState) -> None:
        self._publish = publish
        self._on_state = on_state
        self.state = EngineState(EnginePhase.LOADING, "starting")
        self.requests: list[EngineCoreRequest] = []
        self.got_request = asyncio.Event()
        self.aborts: list[list[str]] = []
        self.commands: list[EngineCommand] = []
        self.answers: list[Future[bool]] = []
        self.snapshots_asked: list[Future[EngineSnapshot]] = []
        self.shutdown_timeouts: list[float] = []
        self.ends_in_time = True
        self.heartbeat_age_s = 0.25

    def start(self) -> None:
        self.set_state(READY)

    def add_request(self, request: EngineCoreRequest) -> None:
        if self.state.phase is not EnginePhase.READY:
            raise EngineDeadError(f"the engine is {self.state.phase}")
        self.requests.append(request)
        self.got_request.set()

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self.aborts.append(list(request_ids))

    def ask(self, command: EngineCommand) -> Future[bool]:
        self.commands.append(command)
        self.answers.append(Future())
        return self.answers[-1]

    def take_snapshot(self) -> Future[EngineSnapshot] | None:
        self.snapshots_asked.append(Future())
        return self.snapshots_asked[-1]

    def seconds_since_progress(self) -> float:
        return self.heartbeat_age_s

    def shutdown(self, timeout_s: float) -> bool:
        self.shutdown_timeouts.append(timeout_s)
        if self.state.phase is not EnginePhase.DEAD:
            self.state = EngineState(EnginePhase.STOPPED, "stopped")
        return self.ends_in_time

    def set_state(self, state: EngineState) -> None:
        self.state = state
        self._on_state(state)

    def step(
        self, *outputs: EngineCoreOutput, stats: SchedulerStats | None = None, started: Sequence[str] = ()
    ) -> None:
        self._publish(EngineCoreOutputs(list(outputs), stats, started_req_ids=list(started)))

    def die(self, reason: str, failure: EngineFailure = EngineFailure.FAULT) -> None:
        self.set_state(EngineState(EnginePhase.DEAD, reason, failure=failure))
        self._publish(EngineCoreOutputs([], engine_error=reason))


def create_request(
    request_id: str = "r",
    *,
    stop: Sequence[str] = (),
    prompt: str = "hello",
    arrival_time: float = 0.0,
    min_tokens: int = 0,
    **fields: Any,
) -> GenerationRequest:
    params = SamplingParams(max_tokens=100, min_tokens=min_tokens)
    engine_request = EngineCoreRequest(request_id, list(map(ord, prompt)), params, arrival_time)
    offsets = range(len(prompt))
    return GenerationRequest(
        engine_request, Prompt(engine_request.prompt_token_ids, prompt, offsets), StopStrings(stop), **fields
    )


def char_bytes(token_id: int) -> bytes:
    return chr(token_id).encode()


def output(
    text: str,
    finish_reason: FinishReason | None = None,
    *,
    request_id: str = "r",
    stop_token_id: int | None = None,
    num_cached_tokens: int = 0,
    error: str | None = None,
) -> EngineCoreOutput:
    """One request's part of a step: the characters are its new tokens."""
    token_ids = list(map(ord, text))
    return EngineCoreOutput(request_id, token_ids, finish_reason, stop_token_id, num_cached_tokens, error)
