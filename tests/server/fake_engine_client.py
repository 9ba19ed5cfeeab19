"""FakeEngineClient: an engine that says what a test tells it to, and remembers what was asked and what was aborted."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Sequence

from engine_core import EngineCommand, EnginePhase, EngineSnapshot, EngineState, FinishReason
from server.engine_client import EngineClient
from server.errors import RequestError
from server.generation import GenerationOutput, GenerationRequest
from server.overload.backlog import Backlog
from server.records import RequestRecord

# An output is yielded, an Event is waited for, an exception is raised.
ScriptItem = GenerationOutput | asyncio.Event | Exception
Script = Callable[[GenerationRequest], Sequence[ScriptItem]]


def create_state(phase: EnginePhase = EnginePhase.READY, **overrides: object) -> EngineState:
    fields: dict[str, object] = {"num_blocks": 16, "block_size": 8, "max_model_len": 64, **overrides}
    return EngineState(phase, **fields)  # type: ignore[arg-type]


def say(*texts: str, finish_reason: FinishReason = FinishReason.STOP, num_cached_tokens: int = 0) -> list[ScriptItem]:
    """One token a text; the last one ends the request."""
    return [
        GenerationOutput(
            text=text,
            num_output_tokens=number,
            finish_reason=finish_reason if number == len(texts) else None,
            num_cached_tokens=num_cached_tokens,
        )
        for number, text in enumerate(texts, start=1)
    ]


class FakeEngineClient(EngineClient):
    """An EngineClient without an engine.

    Args:
        script: Given a request, what happens to it, in order; None = two words, then stop.
        state: The engine's state, which a test may set at any time.

    Attributes:
        snapshot: What an engine that answers at once shows; None = it is busy with a step.
        snapshots_asked: Where a busy one's answers go.
        records: What is noted of live requests.
    """

    def __init__(self, script: Script | None = None, state: EngineState | None = None) -> None:
        self.script: Script = script or (lambda request: say("Hello", " there"))
        self.engine_state = state or create_state()
        self.heartbeat_age_s = 0.0
        self.snapshot: EngineSnapshot | None = None
        self.snapshots_asked: list[asyncio.Future[EngineSnapshot]] = []
        self.records: dict[str, RequestRecord] = {}
        self._num_live = 0
        self.requests: list[GenerationRequest] = []
        self.aborted: list[str] = []
        self.has_aborted = asyncio.Event()
        self.own_backlog = Backlog()
        self.live_ids: set[str] = set()
        self.failed: list[tuple[str, RequestError]] = []
        self.has_failed = asyncio.Event()
        self.commands: list[EngineCommand] = []
        self.obey: Callable[[EngineCommand], bool] = lambda command: True

    @property
    def state(self) -> EngineState:
        return self.engine_state

    @property
    def num_live(self) -> int:
        return self._num_live

    @property
    def backlog(self) -> Backlog:
        return self.own_backlog

    def fail_requests(self, request_ids: Collection[str], error: RequestError) -> int:
        ended = self.live_ids & set(request_ids)
        self.live_ids -= ended
        self.failed += [(request_id, error) for request_id in sorted(ended)]
        if ended:
            self.has_failed.set()
        return len(ended)

    async def command(self, command: EngineCommand) -> bool:
        self.commands.append(command)
        return self.obey(command)

    def take_snapshot(self) -> asyncio.Future[EngineSnapshot] | None:
        self.snapshots_asked.append(asyncio.get_running_loop().create_future())
        if self.snapshot is not None:
            self.snapshots_asked[-1].set_result(self.snapshot)
        return self.snapshots_asked[-1]

    def get_record(self, request_id: str) -> RequestRecord | None:
        return self.records.get(request_id)

    def seconds_since_progress(self) -> float:
        return self.heartbeat_age_s

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationOutput, None]:
        self.requests.append(request)
        self._num_live += 1
        has_ended = False
        record = request.record
        try:
            for item in self.script(request):
                if isinstance(item, asyncio.Event):
                    await item.wait()
                    continue
                if isinstance(item, Exception):
                    has_ended = True
                    raise item
                has_ended = item.finish_reason is not None
                record.num_output_tokens, record.num_cached_tokens = item.num_output_tokens, item.num_cached_tokens
                record.finish_reason = item.finish_reason
                yield item
        finally:
            self._num_live -= 1
            if not has_ended:
                record.finish_reason = FinishReason.ABORT
                self.aborted.append(request.engine_request.request_id)
                self.has_aborted.set()
