from __future__ import annotations

from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from server.overload.gate import Gate
from server.overload.limits import Limits
from server.overload.middleware import PermitMiddleware, get_permit
from server.principal import Principal, set_principal
from tests.server.fake_engine_client import FakeEngineClient
from tests.server.http_helpers import FakeMetrics

ALICE = Principal("alice", frozenset())


def create_gate() -> Gate:
    return Gate(engine_client=FakeEngineClient(), limits=Limits(), metrics=FakeMetrics())


async def call(app: Any, scope: Scope) -> None:
    async def receive() -> Any:
        raise AssertionError("nobody asked for the body")

    async def send(message: Any) -> None:
        raise AssertionError("nobody answered")

    await app(scope, receive, send)


@pytest.mark.parametrize("error", [None, ValueError()])
async def test_a_permit_lasts_as_long_as_its_request_however_that_ends(error: Exception | None) -> None:
    gate, seen = create_gate(), []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        permit = get_permit(scope)
        permit.enter()
        seen.append((permit.principal, gate.num_permits))
        if error:
            raise error

    scope: Scope = {"type": "http", "pointsman.label": "mine"}
    set_principal(scope, ALICE)
    try:
        await call(PermitMiddleware(app, gate), scope)
    except ValueError as raised:
        assert raised is error
    assert seen == [(ALICE, 1)]
    assert gate.num_permits == 0
    assert get_permit(scope).names == {"mine"}


async def test_what_is_no_request_passes_through() -> None:
    scopes: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        scopes.append(scope)

    await call(PermitMiddleware(app, create_gate()), {"type": "lifespan"})
    assert scopes == [{"type": "lifespan"}]
