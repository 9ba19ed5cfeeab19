from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from starlette.types import Message

from engine_core import EngineDeadError, FinishReason
from server.errors import ClientGoneError, RequestError
from server.http.http_metrics import DIRECT_SEND
from server.sse import PING
from server.streaming import EventStream, StreamTiming, generate_all, run_while_connected
from tests.server.fake_engine import create_request
from tests.server.fake_engine_client import FakeEngineClient, ScriptItem, say


class Connection:
    """The ASGI channels of one request whose body has been read."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()
        self.may_send = asyncio.Event()
        self.may_send.set()
        self.sent: list[Message] = []
        self.has_sent = asyncio.Event()

    async def receive(self) -> Message:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        await self.may_send.wait()
        self.sent.append(message)
        self.has_sent.set()

    async def run(self, stream: EventStream) -> None:
        await stream({"type": "http"}, self.receive, self.send)


class Events:
    """A stream of events that waits for ever after its last one, and knows whether it was closed."""

    def __init__(self, *events: bytes) -> None:
        self._events = events
        self.has_begun = asyncio.Event()
        self.is_closed = False

    async def generate(self) -> AsyncGenerator[bytes, None]:
        self.has_begun.set()
        try:
            for event in self._events:
                yield event
            await asyncio.Event().wait()
        finally:
            self.is_closed = True


async def test_work_that_ends_first_gives_its_result_or_its_error() -> None:
    async def add() -> int:
        return 1 + 1

    async def fail() -> None:
        raise ValueError("no")

    connection = Connection()
    assert await run_while_connected(connection.receive, add()) == 2
    with pytest.raises(ValueError, match="no"):
        await run_while_connected(connection.receive, fail())


async def test_work_whose_client_leaves_is_cancelled() -> None:
    connection = Connection()
    connection.gone.set()
    with pytest.raises(ClientGoneError):
        await run_while_connected(connection.receive, asyncio.Event().wait())


async def test_a_client_that_leaves_as_the_work_ends_cancels_nothing_that_comes_after() -> None:
    connection = Connection()

    async def leave_at_the_end() -> int:
        await asyncio.sleep(0)
        connection.gone.set()
        # The watcher sees it now, and is done when this goes on; what it calls then comes too late.
        await asyncio.sleep(0)
        return 1

    assert await run_while_connected(connection.receive, leave_at_the_end()) == 1
    await asyncio.sleep(0)
    assert not asyncio.current_task().cancelling()  # type: ignore[union-attr]


async def test_who_cancels_the_task_from_outside_is_told_so() -> None:
    connection = Connection()
    running = asyncio.create_task(run_while_connected(connection.receive, asyncio.Event().wait()))
    await asyncio.sleep(0)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_stream_is_cleaned_up_when_the_client_leaves_before_its_head() -> None:
    connection, events = Connection(), Events()
    running = asyncio.create_task(connection.run(EventStream(events.generate(), timing=StreamTiming())))
    await events.has_begun.wait()
    connection.gone.set()
    # So that it is counted as what it is: without an answer's head it would be taken for our failure.
    with pytest.raises(ClientGoneError):
        await running
    assert events.is_closed
    assert connection.sent == []


async def test_a_stream_ends_quietly_and_is_cleaned_up_when_the_client_leaves_later() -> None:
    connection, events = Connection(), Events(b"data: 1\n\n")
    running = asyncio.create_task(connection.run(EventStream(events.generate(), timing=StreamTiming())))
    await connection.has_sent.wait()
    connection.gone.set()
    await running
    assert events.is_closed
    assert connection.sent[0]["type"] == "http.response.start"


async def test_a_client_that_does_not_read_is_still_seen_to_leave() -> None:
    connection, events = Connection(), Events(b"data: 1\n\n", b"data: 2\n\n")
    connection.may_send.clear()
    running = asyncio.create_task(connection.run(EventStream(events.generate(), timing=StreamTiming())))
    await events.has_begun.wait()
    connection.gone.set()
    await running
    assert events.is_closed


async def test_cancelling_the_response_cleans_up_too() -> None:
    connection, events = Connection(), Events()
    running = asyncio.create_task(connection.run(EventStream(events.generate(), timing=StreamTiming())))
    await events.has_begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert events.is_closed


async def test_a_ping_starts_the_response_once() -> None:
    connection, events = Connection(), Events()
    timing = StreamTiming(header_wait_s=0.0, ping_interval_s=0.0)
    running = asyncio.create_task(connection.run(EventStream(events.generate(), timing=timing)))
    while len(connection.sent) < 4:
        connection.has_sent.clear()
        await connection.has_sent.wait()
    connection.gone.set()
    await running
    start, *bodies = connection.sent
    assert (start["type"], start["status"]) == ("http.response.start", 200)
    assert all(message["body"] == PING and message["more_body"] for message in bodies)


async def test_what_follows_the_head_goes_past_the_middlewares() -> None:
    async def speak() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"

    connection, seen = Connection(), list[str]()

    async def send_noted(message: Message) -> None:
        seen.append(message["type"])
        await connection.send(message)

    stream = EventStream(speak(), timing=StreamTiming())
    await stream({"type": "http", DIRECT_SEND: connection.send}, connection.receive, send_noted)
    assert seen == ["http.response.start"]
    assert [message.get("body") for message in connection.sent] == [None, b"data: 1\n\n", b""]


async def test_after_the_last_event_the_response_ends() -> None:
    async def speak() -> AsyncGenerator[bytes, None]:
        yield b"data: 1\n\n"

    connection = Connection()
    await connection.run(EventStream(speak(), timing=StreamTiming()))
    assert [message.get("body") for message in connection.sent] == [None, b"data: 1\n\n", b""]
    assert [message.get("more_body") for message in connection.sent] == [None, True, False]


async def read_slowly(engine: FakeEngineClient, num_outputs: int) -> None:
    """Take some outputs of three requests, and before each let the engine get as far ahead as it can."""
    outputs = generate_all(engine, [create_request(request_id) for request_id in "abc"])
    async with asyncio.timeout(1), aclosing(outputs):
        for _ in range(num_outputs):
            await anext(outputs)
            for _ in range(20):
                await asyncio.sleep(0)


async def test_choices_that_are_ahead_of_a_slow_reader_end_when_it_leaves() -> None:
    engine = FakeEngineClient(lambda request: say(*"word" * 10))
    await read_slowly(engine, 1)
    assert sorted(engine.aborted) == ["a", "b", "c"]
    assert engine.num_live == 0


@pytest.mark.parametrize(
    ("last", "kind"),
    [
        (EngineDeadError("The engine died."), EngineDeadError),
        (say("", finish_reason=FinishReason.ERROR)[0], RequestError),
    ],
)
async def test_a_failure_reaches_a_slow_reader_while_other_choices_are_ahead(
    last: ScriptItem, kind: type[Exception]
) -> None:
    running: list[ScriptItem] = list(say(*"word" * 10))
    engine = FakeEngineClient(
        lambda request: [running[0], last] if request.engine_request.request_id == "a" else running
    )
    with pytest.raises(kind):
        await read_slowly(engine, 30)
    assert engine.num_live == 0
