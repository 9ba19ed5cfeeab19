from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from server.errors import ErrorKind, RequestError
from server.generation import GENERATING_PATHS
from server.lifecycle.drain import DrainGate, DrainMiddleware
from tests.server.fake_engine_client import FakeEngineClient
from tests.server.http_helpers import build_app, list_routes

DRAINING = RequestError("Going.", kind=ErrorKind.DRAINING)
COMPLETIONS = "/v1/completions"


class Call:
    """One request with a body of two parts, to an application that waits until it is let go on."""

    def __init__(self, gate: DrainGate, path: str = COMPLETIONS) -> None:
        self.num_refused = 0
        self._app = DrainMiddleware(self._answer, gate, self._note_refused)
        self._scope: Scope = {"type": "http", "path": path, "method": "POST", "headers": []}
        self.parts: list[Message] = [
            {"type": "http.request", "body": b"1", "more_body": True},
            {"type": "http.request", "body": b"2", "more_body": False},
        ]
        self.sent: list[Any] = []
        self.go_on = asyncio.Event()
        self.task = asyncio.create_task(self._app(self._scope, self._receive, self._send))

    async def _receive(self) -> Message:
        return self.parts.pop(0)

    async def _send(self, message: Message) -> None:
        self.sent.append(message)

    def _note_refused(self) -> None:
        self.num_refused += 1

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.go_on.wait()
        self.sent.append("answered")


async def test_the_gate_is_empty_when_the_last_one_inside_is_done() -> None:
    gate = DrainGate()
    assert await gate.wait_empty(0.0)
    calls = [Call(gate) for _ in range(3)]
    await asyncio.sleep(0)
    assert gate.num_inside == 3
    assert not await gate.wait_empty(0.0)
    calls[0].go_on.set()
    calls[1].task.cancel()
    waiting = asyncio.create_task(gate.wait_empty(5.0))
    await asyncio.wait([calls[0].task, calls[1].task])
    assert gate.num_inside == 1 and not waiting.done()
    calls[2].go_on.set()
    assert await waiting


async def test_closed_it_refuses_whoever_comes_but_not_who_is_inside() -> None:
    gate = DrainGate()
    inside = Call(gate)
    await asyncio.sleep(0)
    gate.close(DRAINING)
    outside = Call(gate)
    await outside.task
    start, body = outside.sent
    headers = dict(start["headers"])
    assert (start["status"], headers[b"connection"], headers[b"retry-after"]) == (503, b"close", b"2")
    assert json.loads(body["body"])["error"]["code"] == "draining"
    assert outside.parts == [], "its body is read: else the connection is reset under the answer"
    assert (outside.num_refused, inside.num_refused) == (1, 0)
    inside.go_on.set()
    await inside.task
    assert inside.sent == ["answered"]


async def test_a_line_feed_which_the_router_overlooks_does_not_lead_past_a_closed_gate() -> None:
    gate = DrainGate()
    gate.close(DRAINING)
    call = Call(gate, f"{COMPLETIONS}\n")
    await call.task
    assert (call.num_refused, call.sent[0]["status"]) == (1, 503)


@pytest.mark.parametrize("path", ["/metrics", "/tokenize", "/v1/models"])
async def test_what_generates_nothing_passes_a_closed_gate_and_is_not_waited_for(path: str) -> None:
    gate = DrainGate()
    gate.close(DRAINING)
    call = Call(gate, path)
    assert await gate.wait_empty(0.0)
    call.go_on.set()
    await call.task
    assert call.sent == ["answered"]


def test_every_path_of_the_gate_is_a_route() -> None:
    paths = {getattr(route, "path", "") for route in list_routes(build_app(FakeEngineClient()))}
    assert paths >= set(GENERATING_PATHS)
