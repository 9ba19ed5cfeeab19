from __future__ import annotations

import asyncio

import pytest
from fastapi import FastAPI, Request, Response
from starlette.types import Receive, Scope, Send

from server.batch.asgi_call import post_json


async def test_the_application_gets_a_post_with_the_body_and_the_whole_answer_comes_back() -> None:
    app = FastAPI()

    @app.post("/v1/echo", status_code=418)
    async def echo(request: Request) -> Response:
        seen = [request.headers["content-type"], request.headers["content-length"]]
        return Response(await request.body(), 418, headers={"x-seen": " ".join(seen)})

    reply = await post_json(app, "/v1/echo", b'{"a":1}')
    assert (reply.status, reply.body) == (418, b'{"a":1}')
    assert reply.headers["x-seen"] == "application/json 7"


async def test_an_answer_in_pieces_is_put_together() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for piece in (b"one ", b"two"):
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body"})

    assert (await post_json(app, "/", b"{}")).body == b"one two"


async def test_the_client_stays_until_the_call_is_cancelled() -> None:
    has_begun, seen = asyncio.Event(), list[str]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append((await receive())["type"])
        has_begun.set()
        seen.append((await receive())["type"])

    calling = asyncio.create_task(post_json(app, "/", b"{}"))
    await asyncio.wait_for(has_begun.wait(), 5)
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert seen == ["http.request"]
