"""Drain: the end of serving. Once begun it lets in no request for a generation, and tells when the last is answered.

Pure ASGI, on the event loop's thread. Knows no engine; why it begins is its owner's business.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import RequestError, build_error_response
from server.generation import GENERATING_PATHS


class Drain:
    """Counts the requests in hand: from a request's last byte to the last byte of its answer.

    Not from its head on: a body that never comes would be waited for until the drain's patience ends, for nobody.

    Attributes:
        refusal: What newcomers are told; None = it has not begun.
    """

    def __init__(self) -> None:
        self.refusal: RequestError | None = None
        self._num_in_hand = 0
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._has_stopped_reading = False
        self._waits: set[asyncio.Timeout] = set()

    @property
    def num_in_hand(self) -> int:
        """Requests that have arrived and are not answered."""
        return self._num_in_hand

    def begin(self, refusal: RequestError) -> None:
        """Let nobody in from now on; once begun, only the reason may change.

        Args:
            refusal: What newcomers are told, among them those whose body is still on its way.
        """
        self.refusal = refusal

    def stop_reading(self, refusal: RequestError) -> None:
        """Wait for no byte of any body from now on: connections are about to be closed.

        Args:
            refusal: What the senders are told, unless the drain has begun with another.
        """
        self.refusal = self.refusal or refusal
        self._has_stopped_reading = True
        for wait in self._waits:
            wait.reschedule(0.0)
        self._waits.clear()

    def enter(self) -> None:
        """Be in hand."""
        self._num_in_hand += 1
        self._is_empty.clear()

    def leave(self) -> None:
        """Be so no longer."""
        self._num_in_hand -= 1
        if not self._num_in_hand:
            self._is_empty.set()

    async def wait_empty(self, timeout_s: float) -> bool:
        """Wait until nobody is in hand, but not longer than this; return whether that is so."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._is_empty.wait()
        return not self._num_in_hand

    async def read(self, receive: Receive) -> Message:
        """Return the next part of a body.

        Raises:
            RequestError: Nobody waits for it any more.
        """
        # Set off by stop_reading(); a task of its own for each part would cost more.
        wait = asyncio.timeout(0.0 if self._has_stopped_reading else None)
        try:
            async with wait:
                self._waits.add(wait)
                return await receive()
        except TimeoutError:
            if self.refusal is None or not wait.expired():
                raise
            raise self.refusal from None
        finally:
            self._waits.discard(wait)


class DrainMiddleware:
    """Keeps account for a drain.

    Args:
        app: What answers.
        drain: Which its owner begins.
        on_refused: Called for each request for a generation that comes too late.
    """

    def __init__(self, app: ASGIApp, drain: Drain, on_refused: Callable[[], None] = lambda: None) -> None:
        self._app = app
        self._drain = drain
        self._on_refused = on_refused

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # Whatever else a server answers takes no time worth waiting for, and operators ask it to the end.
        # The router takes a line feed at the end of a path for nothing.
        is_counted = scope["path"].removesuffix("\n") in GENERATING_PATHS
        if is_counted and self._drain.refusal is not None:
            self._on_refused()
            await _read_to_end(self._drain, receive)
            await build_error_response(self._drain.refusal)(scope, receive, send)
            return
        arrival = _Arrival(self._drain, receive, is_counted=is_counted, on_refused=self._on_refused)
        try:
            await self._app(scope, arrival.receive, send)
        finally:
            arrival.end()


class _Arrival:
    """One request that was let in; if it counts, in hand once its body has come, unless a drain has begun by then."""

    def __init__(self, drain: Drain, receive: Receive, *, is_counted: bool, on_refused: Callable[[], None]) -> None:
        self._drain = drain
        self._receive = receive
        self._is_counted = is_counted
        self._on_refused = on_refused
        self._has_arrived = False
        self._is_in_hand = False

    async def receive(self) -> Message:
        if self._has_arrived:
            return await self._receive()
        message = await self._drain.read(self._receive)
        self._has_arrived = not message.get("more_body", False)  # or its client has left
        if self._has_arrived and self._is_counted and message["type"] == "http.request":
            self._be_counted()
        return message

    def _be_counted(self) -> None:
        if self._drain.refusal is not None:
            self._on_refused()
            raise self._drain.refusal
        self._drain.enter()
        self._is_in_hand = True

    def end(self) -> None:
        if self._is_in_hand:
            self._drain.leave()


async def _read_to_end(drain: Drain, receive: Receive) -> None:
    # A connection that is closed upon unread bytes is reset, and the client may never see the answer.
    with suppress(RequestError):
        while (await drain.read(receive)).get("more_body", False):
            pass
