"""InProcEngineClient: the EngineClient over an engine on another thread of this process. Knows no HTTP and no text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection
from typing import TypeVar

from engine_core import EngineCommand, EngineCoreOutputs, EngineSnapshot, EngineState
from server.engine_api import EngineFactory, OnState
from server.engine_client import EngineClient
from server.errors import RequestError, ServerStoppingError
from server.generation import GenerationOutput, GenerationRequest
from server.output_processor import OutputProcessor
from server.overload.backlog import Backlog
from server.records import RequestRecord

T = TypeVar("T")


class InProcEngineClient(EngineClient):
    """An engine on another thread of this process.

    Everything but the two callbacks handed to the engine runs on the event loop's thread. One engine step is one
    ``call_soon_threadsafe``; the engine never waits for the loop.

    Args:
        create_engine: Makes the engine, given where its outputs and states go; it is started by ``start``.
        output_processor: Turns its outputs into text.
    """

    def __init__(self, create_engine: EngineFactory, output_processor: OutputProcessor) -> None:
        self._processor = output_processor
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_state: OnState = lambda state: None
        self._engine = create_engine(self._publish, self._publish_state)

    def start(self, on_state: OnState = lambda state: None) -> None:
        """Start the engine; call on the running loop.

        Args:
            on_state: Hears each new state of the engine, on the loop's thread.
        """
        self._loop = asyncio.get_running_loop()
        self._on_state = on_state
        self._engine.start()

    @property
    def state(self) -> EngineState:
        return self._engine.state

    @property
    def num_live(self) -> int:
        """Requests that have not ended."""
        return self._processor.num_live

    @property
    def backlog(self) -> Backlog:
        return self._processor.backlog

    def take_snapshot(self) -> asyncio.Future[EngineSnapshot] | None:
        future = self._engine.take_snapshot()
        if future is None:
            return None
        snapshot = asyncio.wrap_future(future)
        # Whoever asked may have given up by the time the engine ends; asyncio would log that as a failure.
        snapshot.add_done_callback(lambda done: done.cancelled() or done.exception())
        return snapshot

    def get_record(self, request_id: str) -> RequestRecord | None:
        return self._processor.get_record(request_id)

    def seconds_since_progress(self) -> float:
        return self._engine.seconds_since_progress()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationOutput, None]:
        request_id = request.engine_request.request_id
        stream = self._processor.add(request)
        try:
            self._engine.add_request(request.engine_request)
            async for output in stream:
                yield output
        finally:
            if self._processor.discard(request_id):
                self._engine.abort_requests([request_id])

    def fail_requests(self, request_ids: Collection[str], error: RequestError) -> int:
        ended = self._processor.fail(request_ids, error)
        if ended:
            self._engine.abort_requests(ended)
        return len(ended)

    async def command(self, command: EngineCommand) -> bool:
        return await asyncio.wrap_future(self._engine.ask(command))

    def fail_all(self, reason: str, kind: type[Exception] = ServerStoppingError) -> None:
        """End every live request with an exception that says ``reason``, and abort it in the engine."""
        request_ids = self._processor.fail_all(reason, kind)
        if request_ids:
            self._engine.abort_requests(request_ids)

    def shutdown(self, timeout_s: float) -> bool:
        """Stop the engine after its current step; wait for it at most this long. Nothing else may be called later.

        Returns:
            Whether no thread of the engine is left.
        """
        return self._engine.shutdown(timeout_s)

    # ------------------------------------------------------------------ the engine's thread
    def _publish(self, outputs: EngineCoreOutputs) -> None:
        self._call_on_loop(self._take_outputs, outputs)

    def _publish_state(self, state: EngineState) -> None:
        self._call_on_loop(self._take_state, state)

    def _call_on_loop(self, callback: Callable[[T], None], argument: T) -> None:
        if self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(callback, argument)
        except RuntimeError:
            # asyncio has no error of its own for a closed loop: the process is going down and nobody is left to hear.
            if not self._loop.is_closed():
                raise

    # ------------------------------------------------------------------ the loop's thread
    def _take_outputs(self, outputs: EngineCoreOutputs) -> None:
        to_abort = self._processor.process(outputs)
        if to_abort:
            self._engine.abort_requests(to_abort)

    def _take_state(self, state: EngineState) -> None:
        self._on_state(state)
