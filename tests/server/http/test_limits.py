"""Bodies that are too many at once; a single one that is too large is test_app's."""

from __future__ import annotations

import pytest
from starlette.types import Message, Receive, Scope, Send

from server.errors import ErrorKind, RequestError
from server.http.limits import BodyLimitMiddleware

SCOPE: Scope = {"type": "http", "path": "/", "method": "POST", "headers": []}


async def swallow(message: Message) -> None:
    pass


class Crowd:
    """Requests through one middleware, each of which the test advances by hand."""

    def __init__(self) -> None:
        self.middleware = BodyLimitMiddleware(self._answer, max_bytes=100, max_held_bytes=150)
        self.num_read = 0

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        self.num_read += 1
        if scope["path"] == "/nested":  # others ask while this one is being read
            await self.ask(90)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/streams":
            await self.ask(90)

    async def ask(self, size: int, path: str = "/") -> None:
        async def receive() -> Message:
            return {"type": "http.request", "body": b"x" * size, "more_body": False}

        await self.middleware({**SCOPE, "path": path}, receive, swallow)


async def test_bodies_that_hold_too_much_together_are_refused_until_some_are_answered() -> None:
    crowd = Crowd()
    with pytest.raises(RequestError) as caught:
        await crowd.ask(90, "/nested")
    assert caught.value.kind is ErrorKind.BODIES_TOO_MANY and "ask again" in str(caught.value)
    assert crowd.num_read == 1
    for _ in range(3):  # what was held is given back, however it ended
        await crowd.ask(90)
    assert crowd.num_read == 4


async def test_a_request_whose_answer_has_begun_holds_no_body() -> None:
    crowd = Crowd()
    await crowd.ask(90, "/streams")
    assert crowd.num_read == 2


async def test_one_alone_is_only_too_large_by_itself() -> None:
    crowd = Crowd()
    await crowd.ask(100)
    with pytest.raises(RequestError) as caught:
        await crowd.ask(101)
    assert caught.value.kind is ErrorKind.BODY_TOO_LARGE
