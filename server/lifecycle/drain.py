"""The gate that every request for a generation passes: closed, it lets none in and tells when the last one is done.

Pure ASGI, on the event loop's thread. Knows no engine; why it closes is its owner's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import RequestError, build_error_response
from server.generation import GENERATING_PATHS


class DrainGate:
    """Counts the requests inside: from a request's head to the last byte of its answer.

    Attributes:
        refusal: What newcomers are told; None = the gate is open.
    """

    def __init__(self) -> None:
        self.refusal: RequestError | None = None
        self._num_inside = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()

    @property
    def num_inside(self) -> int:
        """Requests that have been let in and are not done."""
        return self._num_inside

    def close(self, refusal: RequestError) -> None:
        """Let nobody in from now on; once closed, only the reason may change.

        Args:
            refusal: What newcomers are told.
        """
        self.refusal = refusal

    @contextmanager
    def hold(self) -> Iterator[None]:
        """Be inside."""
        self._num_inside += 1
        self._is_empty.clear()
        try:
            yield
        finally:
            self._num_inside -= 1
            if not self._num_inside:
                self._is_empty.set()

    async def wait_empty(self, timeout_s: float) -> bool:
        """Wait until nobody is inside, but not longer than this; return whether that is so."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
        return not self._num_inside


class DrainMiddleware:
    """Keeps the gate.

    Args:
        app: What answers.
        gate: Which its owner closes.
        on_refused: Called for each request that finds it closed.
    """

    def __init__(self, app: ASGIApp, gate: DrainGate, on_refused: Callable[[], None] = lambda: None) -> None:
        self._app = app
        self._gate = gate
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Whatever else a server answers takes no time worth waiting for, and operators ask it to the end.
        # The router takes a line feed at the end of a path for nothing.
        if scope["type"] != "http" or scope["path"].removesuffix("\n") not in GENERATING_PATHS:
            await self._app(scope, receive, send)
        elif self._gate.refusal is not None:
            self._on_refused()
            await _read_to_end(receive)
            await build_error_response(self._gate.refusal)(scope, receive, send)
        else:
            with self._gate.hold():
                await self._app(scope, receive, send)


async def _read_to_end(receive: Receive) -> None:
    # A connection that is closed upon unread bytes is reset, and the client may never see the answer.
    while (await receive()).get("more_body", False):
        pass
