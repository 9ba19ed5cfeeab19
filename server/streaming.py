"""Running generations for one connection: whole answers, event streams, pings, and the client's leaving.

Knows ASGI and EngineClient; what a chunk looks like is the ReplyShape's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from engine_core import FinishReason
from server.engine_client import EngineClient
from server.errors import ClientGoneError, ErrorKind, RequestError, as_request_error, build_error_body
from server.generation import GenerationOutput, GenerationRequest
from server.http.http_metrics import DIRECT_SEND
from server.logs.http_record import note_disconnect, note_error
from server.replies import Choice, create_choices
from server.sse import DONE, PING, build_event

T = TypeVar("T")
IndexedOutputs = AsyncGenerator[tuple[int, GenerationOutput], None]

_STREAM_HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


@dataclass(frozen=True, slots=True)
class StreamTiming:
    """When a stream speaks without having anything to say.

    Attributes:
        header_wait_s: Headers wait this long for the first token, so that an early failure still has a status.
        ping_interval_s: Silence after which a comment is sent, so that no proxy cuts the stream.
    """

    header_wait_s: float = 5.0
    ping_interval_s: float = 15.0


async def run_while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` to its end, or cancel it as soon as the client leaves.

    Args:
        receive: The connection's ASGI channel, its body read to the end.
        work: Cleans up after itself when cancelled.

    Raises:
        ClientGoneError: The client left first.
    """
    # A task of its own, not this one: what wakes this one passes through all layers between it and the socket.
    task = asyncio.create_task(work)
    has_left = False

    def leave(watch: asyncio.Task[None]) -> None:
        nonlocal has_left
        if not watch.cancelled():
            watch.exception()  # a connection that fails is one that is gone
            has_left = task.cancel()

    watch = asyncio.create_task(_wait_for_disconnect(receive))
    watch.add_done_callback(leave)
    try:
        return await task
    except asyncio.CancelledError:
        # Somebody may have cancelled this task too, and is to hear of it.
        if has_left and not _is_cancelled():
            raise ClientGoneError from None
        raise
    finally:
        watch.cancel()


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def collect_choices(engine_client: EngineClient, requests: Sequence[GenerationRequest]) -> list[Choice]:
    """Run requests to their ends and return one Choice each.

    Raises:
        RequestError: One of them failed; the others are aborted.
        EngineDeadError: The engine died.
    """
    choices = create_choices(requests)
    async with aclosing(generate_all(engine_client, requests)) as outputs:
        async for index, output in outputs:
            choices[index].add(output)
    return choices


async def generate_all(engine_client: EngineClient, requests: Sequence[GenerationRequest]) -> IndexedOutputs:
    """Run requests side by side and yield (index, output) as they come; closing it aborts all of them.

    Raises:
        RequestError: One of them ended by an error or was aborted by the server.
        EngineDeadError: The engine died.
    """
    merged = _generate_one(engine_client, requests[0]) if len(requests) == 1 else _merge(engine_client, requests)
    async with aclosing(merged) as outputs:
        async for index, output in outputs:
            check_success(output)
            yield index, output


class EventStream(StreamingResponse):
    """A response of server-sent events that starts late, pings, tells errors, and ends with its client.

    Args:
        events: Yields bytes of whole events. Closed promptly when the client leaves.
        timing: When to speak without an event.
    """

    def __init__(self, events: AsyncGenerator[bytes, None], *, timing: StreamTiming) -> None:
        super().__init__(events, headers=_STREAM_HEADERS, media_type="text/event-stream")
        self._events = events
        self._timing = timing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        start: Message = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        writer = _EventWriter(scope, send, start, self._timing)
        try:
            await run_while_connected(receive, writer.run(self._events))
        except ClientGoneError:
            note_disconnect(scope)
            # Once headers are on their way, starlette takes any error for a failure, with a traceback in the log.
            if not writer.has_begun:
                raise


class _EventWriter:
    def __init__(self, scope: Scope, send: Send, start: Message, timing: StreamTiming) -> None:
        self._scope = scope
        self._send_start = send
        self._send_body = scope.get(DIRECT_SEND, send)
        self._start = start
        self._timing = timing
        self._lock = asyncio.Lock()
        self.has_begun = False
        self._has_started = False
        self._loop = asyncio.get_running_loop()
        self._last_sent_s = 0.0
        self._ping: asyncio.Task[None] | None = None

    async def run(self, events: AsyncGenerator[bytes, None]) -> None:
        try:
            await self._write_all(events)
        except Exception as error:
            if not self._has_started:
                raise
            told = as_request_error(error)
            note_error(self._scope, told.note)
            await self._send(build_event(build_error_body(told)) + DONE)
        await self._send(b"", more_body=False)

    async def _write_all(self, events: AsyncGenerator[bytes, None]) -> None:
        self._silence = self._loop.call_later(self._timing.header_wait_s, self._break_silence)
        try:
            async with aclosing(events):
                async for event in events:
                    if not self._has_started:
                        await self._send(event)
                        continue
                    # As _send, without its call: once a token.
                    await self._send_body({"type": "http.response.body", "body": event, "more_body": True})
                    self._last_sent_s = self._loop.time()
        finally:
            self._silence.cancel()
            if self._ping is not None:
                await _cancel(self._ping)

    def _break_silence(self) -> None:
        """Ping if nothing has been sent for as long as allowed; look again when that may be so."""
        now, interval_s = self._loop.time(), self._timing.ping_interval_s
        if not self._has_started or now >= self._last_sent_s + interval_s:
            # One that still waits for the socket is enough.
            if self._ping is None or self._ping.done():
                self._ping = asyncio.create_task(self._send(PING))
            self._silence = self._loop.call_later(interval_s, self._break_silence)
        else:
            self._silence = self._loop.call_at(self._last_sent_s + interval_s, self._break_silence)

    async def _send(self, body: bytes, *, more_body: bool = True) -> None:
        if not self._has_started:
            # The lock keeps a ping from overtaking the start message while that waits for the socket.
            async with self._lock:
                if not self._has_started:
                    self.has_begun = True
                    await self._send_start(self._start)
                    self._has_started = True
        await self._send_body({"type": "http.response.body", "body": body, "more_body": more_body})
        self._last_sent_s = self._loop.time()


async def _generate_one(engine_client: EngineClient, request: GenerationRequest) -> IndexedOutputs:
    # As _merge, without its task and its queue: they cost a whole answer 3 us a token.
    async with aclosing(engine_client.generate(request)) as outputs:
        async for output in outputs:
            yield 0, output


async def _merge(engine_client: EngineClient, requests: Sequence[GenerationRequest]) -> IndexedOutputs:
    # Bounded, so that a slow reader slows the feeders and not the server's memory.
    queue: asyncio.Queue[tuple[int, GenerationOutput] | Exception | None] = asyncio.Queue(len(requests))

    async def feed(index: int, request: GenerationRequest) -> None:
        # Once cancelled it puts nothing: nobody takes any more, and a full queue would hold it for ever.
        try:
            async with aclosing(engine_client.generate(request)) as outputs:
                async for output in outputs:
                    await queue.put((index, output))
            await queue.put(None)
        except Exception as error:
            await queue.put(error)

    feeders = [asyncio.create_task(feed(index, request)) for index, request in enumerate(requests)]
    num_running = len(feeders)
    try:
        while num_running:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                num_running -= 1
            else:
                yield item
    finally:
        await _cancel(*feeders)


def check_success(output: GenerationOutput) -> None:
    """Raise what a request's last output says went wrong.

    Raises:
        RequestError: It ended by an error, or was aborted by the server.
    """
    if output.finish_reason is FinishReason.ERROR:
        sentence = output.error or "The engine failed on this request."
        raise RequestError(sentence, kind=ErrorKind.INTERNAL)
    if output.finish_reason is FinishReason.ABORT:
        raise RequestError("The server ended this request before it was answered.", kind=ErrorKind.ABORTED)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
