from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from server.errors import ErrorKind, RequestError
from server.generation import GENERATING_PATHS
from server.lifecycle.drain import Drain, DrainMiddleware
from tests.server.fake_engine_client import FakeEngineClient
from tests.server.http_helpers import build_app, list_routes

DRAINING = RequestError("Going.", kind=ErrorKind.DRAINING)
COMPLETIONS = "/v1/completions"


class Call:
    """One request to an application that reads its body, waits until it is let go on, and answers.

    The first half of the body has come; the test sends the rest.
    """

    def __init__(self, drain: Drain, path: str = COMPLETIONS) -> None:
        self.num_refused = 0
        self.error: RequestError | None = None
        self.sent: list[Any] = []
        self.go_on = asyncio.Event()
        self._parts: asyncio.Queue[Message] = asyncio.Queue()
        self._send_part(b"1", more_body=True)
        app = DrainMiddleware(self._answer, drain, self._note_refused)
        scope: Scope = {"type": "http", "path": path, "method": "POST", "headers": []}
        self.task = asyncio.create_task(app(scope, self._parts.get, self._send))

    @property
    def num_unread(self) -> int:
        return self._parts.qsize()

    async def send_rest(self) -> None:
        """Send the other half; the application has had time to read it when this returns."""
        self._send_part(b"2", more_body=False)
        await settle()

    async def leave(self) -> None:
        self._parts.put_nowait({"type": "http.disconnect"})
        await settle()

    def _send_part(self, body: bytes, *, more_body: bool) -> None:
        self._parts.put_nowait({"type": "http.request", "body": body, "more_body": more_body})

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    def _note_refused(self) -> None:
        self.num_refused += 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            while (await receive()).get("more_body", False):
                pass
        except RequestError as error:  # an error handler's part
            self.error = error
            return
        await self.go_on.wait()
        await receive()  # as whoever waits for the client to leave
        self.sent.append("answered")


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def create_calls(drain: Drain, num_calls: int) -> list[Call]:
    """Requests that have arrived."""
    calls = [Call(drain) for _ in range(num_calls)]
    for call in calls:
        await call.send_rest()
    return calls


async def test_it_is_empty_when_the_last_one_that_has_arrived_is_answered() -> None:
    drain = Drain()
    assert await drain.wait_empty(0.0)
    calls = await create_calls(drain, 3)
    assert drain.num_in_hand == 3
    assert not await drain.wait_empty(0.0)
    for call in calls:
        await call.leave()
    calls[0].go_on.set()
    calls[1].task.cancel()
    waiting = asyncio.create_task(drain.wait_empty(5.0))
    await asyncio.wait([calls[0].task, calls[1].task])
    assert drain.num_in_hand == 1 and not waiting.done()
    calls[2].go_on.set()
    assert await waiting


async def test_once_begun_it_refuses_whoever_comes_but_not_who_has_arrived() -> None:
    drain = Drain()
    (inside,) = await create_calls(drain, 1)
    drain.begin(DRAINING)
    outside = Call(drain)
    await outside.send_rest()
    await outside.task
    start, body = outside.sent
    headers = dict(start["headers"])
    assert (start["status"], headers[b"connection"], headers[b"retry-after"]) == (503, b"close", b"2")
    assert json.loads(body["body"])["error"]["code"] == "draining"
    assert not outside.num_unread, "its body is read: else the connection is reset under the answer"
    assert (outside.num_refused, inside.num_refused) == (1, 0)
    inside.go_on.set()
    await inside.leave()
    await inside.task
    assert inside.sent == ["answered"]


async def test_a_body_that_does_not_come_is_not_waited_for_and_one_that_comes_late_is_refused() -> None:
    drain = Drain()
    call = Call(drain)
    await settle()
    assert (drain.num_in_hand, call.num_unread) == (0, 0)
    drain.begin(DRAINING)
    assert await drain.wait_empty(0.0)
    assert not call.task.done(), "it may still come, and its sender be told"
    await call.send_rest()
    await call.task
    assert (call.error, call.num_refused, drain.num_in_hand) == (DRAINING, 1, 0)


async def test_a_client_that_leaves_amid_its_body_was_never_in_hand() -> None:
    drain = Drain()
    calls = [Call(drain), Call(drain)]
    await settle()
    await calls[0].leave()
    assert drain.num_in_hand == 0
    drain.begin(DRAINING)
    await calls[1].leave()
    assert [call.error for call in calls] == [None, None]
    assert [call.num_refused for call in calls] == [0, 0]
    for call in calls:
        call.task.cancel()


@pytest.mark.parametrize("path", [COMPLETIONS, "/tokenize"])
async def test_when_connections_are_closed_no_body_is_waited_for(path: str) -> None:
    drain = Drain()
    before = Call(drain, path)
    (arrived,) = await create_calls(drain, 1)
    await settle()
    drain.begin(DRAINING)
    newcomer = Call(drain, path)
    await settle()
    drain.stop_reading(RequestError("Gone.", kind=ErrorKind.DRAINING))
    later = Call(drain, path)
    for call in (before, newcomer, later):
        await asyncio.wait_for(call.task, 5)
        assert call.error is DRAINING or call.sent[0]["status"] == 503, "the reason is the first one"
    assert not arrived.task.done() and arrived.error is None
    arrived.go_on.set()
    await arrived.leave()
    assert arrived.sent == ["answered"]


async def test_who_stops_reading_without_a_drain_says_why() -> None:
    drain = Drain()
    call = Call(drain)
    await settle()
    drain.stop_reading(DRAINING)
    await asyncio.wait_for(call.task, 5)
    assert call.error is DRAINING and drain.refusal is DRAINING


async def test_a_timeout_of_the_connection_itself_is_no_refusal() -> None:
    async def receive() -> Message:
        raise TimeoutError("the network")

    drain = Drain()
    drain.begin(DRAINING)
    with pytest.raises(TimeoutError, match="the network"):
        await drain.read(receive)


async def test_a_line_feed_which_the_router_overlooks_does_not_lead_past_a_drain() -> None:
    drain = Drain()
    drain.begin(DRAINING)
    call = Call(drain, f"{COMPLETIONS}\n")
    await call.send_rest()
    await call.task
    assert (call.num_refused, call.sent[0]["status"]) == (1, 503)


@pytest.mark.parametrize("path", ["/metrics", "/tokenize", "/v1/models"])
async def test_what_generates_nothing_is_answered_during_a_drain_and_not_waited_for(path: str) -> None:
    drain = Drain()
    drain.begin(DRAINING)
    call = Call(drain, path)
    await call.send_rest()
    assert await drain.wait_empty(0.0)
    call.go_on.set()
    await call.leave()
    await call.task
    assert (call.sent, call.num_refused) == (["answered"], 0)


def test_every_path_that_is_drained_is_a_route() -> None:
    paths = {getattr(route, "path", "") for route in list_routes(build_app(FakeEngineClient()))}
    assert paths >= set(GENERATING_PATHS)
