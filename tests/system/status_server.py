"""The status page over a fake engine, on a port, in this process: states that no real load brings about at will."""

from __future__ import annotations

import asyncio
import socket
import threading
from types import TracebackType

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from engine_core import EngineSnapshot
from server.app import AppSettings, create_app
from server.status.feed import StatusSources
from tests.server.fake_engine_client import FakeEngineClient
from tests.server.http_helpers import FakeMetrics, create_admission


class KeyCheck:
    """Asks for a key, but for the page itself."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app, self._key = app, f"Bearer {key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_open = scope["type"] != "http" or scope["path"] == "/status"
        if is_open or dict(scope["headers"]).get(b"authorization") == self._key:
            await self._app(scope, receive, send)
        else:
            body = {"error": {"message": "This API key is not known here.", "code": "invalid_api_key"}}
            await JSONResponse(body, status_code=401)(scope, receive, send)


class StatusServer:
    """`with StatusServer(snapshot) as server: browser.open(server.url)`.

    Args:
        snapshot: What the engine shows.
        port: 0 = a free one.
        key: What it asks for; None = it is open.

    Attributes:
        url: Of the page.
        client: Its engine.
        sources: What happened so far.
        feed: The application's.
    """

    def __init__(self, snapshot: EngineSnapshot, *, port: int = 0, key: str | None = None) -> None:
        # It listens from here on, before anything answers: nobody is turned away.
        self._sock = socket.create_server(("127.0.0.1", port))
        self.port: int = self._sock.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}/status"
        self.sources = StatusSources()
        self.client = client = FakeEngineClient()
        client.snapshot = snapshot
        app = create_app(
            engine_client=client,
            admission=create_admission(client),
            metrics=FakeMetrics(),
            settings=AppSettings(served_model_name="org/fake-model", version="1.2.3", system_fingerprint="fp"),
            status_sources=self.sources,
        )
        self.feed = app.state.status_feed
        served: ASGIApp = app if key is None else KeyCheck(app, key)
        self._server = uvicorn.Server(uvicorn.Config(served, log_config=None, ws="none"))
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> StatusServer:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._loop.call_soon_threadsafe(self.feed.close)
        self._server.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with asyncio.Runner() as runner:
            self._loop = runner.get_loop()
            runner.run(self._server.serve(sockets=[self._sock]))
