"""StatusFeed: a document a second for whoever looks at the status page, made once for all of them, and only then.

Runs on the event loop. The engine is asked between two steps and never waited for: while a step runs, the last look at
it stands, with its age.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from engine_core import EngineDeadError, EngineSnapshot
from server.engine_client import EngineClient
from server.errors import ErrorKind, RequestError
from server.lifecycle.drain import Drain
from server.readiness import assess_readiness
from server.sse import build_event
from server.status.document import About, FigureSource, Present, build_blocks, build_document, read_figures
from server.status.error_log import ErrorLog
from server.status.history import StatusHistory

logger = logging.getLogger(__name__)

MAX_VIEWERS = 16


@dataclass(frozen=True, slots=True)
class StatusSources:
    """What remembers, whether or not anybody looks.

    Attributes:
        history: Of steps and seconds.
        errors: Of the log.
    """

    history: StatusHistory = field(default_factory=StatusHistory)
    errors: ErrorLog = field(default_factory=ErrorLog)


@dataclass(frozen=True, slots=True)
class FeedTiming:
    """When documents are made.

    Attributes:
        interval_s: Between two of them.
        patience_s: So long one waits for the engine to come to the end of a step.
    """

    interval_s: float = 1.0
    patience_s: float = 0.2


class StatusFeed:
    """Makes documents and hands them to viewers.

    Args:
        engine_client: The engine.
        figures: Where the figures of /metrics are read.
        sources: What happened so far.
        about: The server.
        drain: Begun, it is the server's phase.
        timing: When.
        clock: Seconds, monotonic.

    Attributes:
        num_viewers: Streams that are open.
    """

    def __init__(
        self,
        *,
        engine_client: EngineClient,
        figures: FigureSource,
        sources: StatusSources,
        about: About,
        drain: Drain | None = None,
        timing: FeedTiming | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine_client = engine_client
        self._figures = figures
        self._sources = sources
        self._about = about
        self._drain = drain or Drain()
        self._timing = timing or FeedTiming()
        self._clock = clock
        self._started = clock()
        self.num_viewers = 0
        self._is_closed = False
        self._asked: asyncio.Future[EngineSnapshot] | None = None
        self._snapshot: EngineSnapshot | None = None
        self._snapshot_time = 0.0
        self._ticker: asyncio.Task[None] | None = None
        self._latest: bytes | None = None
        self._has_news = asyncio.Event()

    async def take_document(self) -> dict[str, Any]:
        """Return what there is to know now."""
        await self._look_at_engine()
        now, client, snapshot = self._clock(), self._engine_client, self._snapshot
        document = build_document(
            Present(
                about=self._about,
                phase=assess_readiness(client, self._drain).status,
                state=client.state,
                uptime_s=now - self._started,
                stalled_s=client.seconds_since_progress(),
                snapshot=snapshot,
                snapshot_age_s=now - self._snapshot_time,
                figures=read_figures(self._figures),
                steps=self._sources.history.list_steps(),
                seconds=self._sources.history.list_seconds(),
                errors=self._sources.errors.list_errors(),
                key_ids=self._get_key_ids(snapshot),
            )
        )
        document["blocks"] = None
        if snapshot is not None:  # on a thread: there may be a hundred thousand
            document["blocks"] = await asyncio.to_thread(build_blocks, snapshot.blocks, client.state.block_size)
        return document

    async def watch(self) -> AsyncGenerator[bytes, None]:
        """Yield an event a second, each a document, until the server stops. A slow reader misses some.

        Raises:
            RequestError: Too many look already.
        """
        if self.num_viewers >= MAX_VIEWERS:
            message = f"{MAX_VIEWERS} viewers look at this page already; close one, or read /status.json."
            raise RequestError(message, kind=ErrorKind.TOO_MANY_VIEWERS)
        self.num_viewers += 1
        try:
            if self._ticker is None or self._ticker.done():
                self._ticker = asyncio.create_task(self._tick())
            seen: bytes | None = None
            while not self._is_closed:
                if self._latest is not None and self._latest is not seen:
                    seen = self._latest
                    yield seen
                else:
                    await self._has_news.wait()
        finally:
            self.num_viewers -= 1
            if not self.num_viewers:
                self._rest()

    def close(self) -> None:
        """End every stream: the server stops, and would wait for them."""
        self._is_closed = True
        self._rest()
        self._announce()

    # ------------------------------------------------------------------ while somebody looks
    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            started = loop.time()
            try:
                self._latest = build_event(await self.take_document())
                self._announce()
            except Exception:  # a page that stands still is better than a stream that ends
                logger.exception("the status page could not be brought up to date")
            await asyncio.sleep(max(0.0, started + self._timing.interval_s - loop.time()))

    def _announce(self) -> None:
        # Whoever waits now goes on; whoever comes later waits for the next one.
        self._has_news.set()
        self._has_news = asyncio.Event()

    def _rest(self) -> None:
        if self._ticker is not None:
            self._ticker.cancel()
        self._ticker = self._latest = None

    async def _look_at_engine(self) -> None:
        """Have a fresh look at the engine, if it comes soon."""
        if self._asked is None:
            self._asked = self._engine_client.take_snapshot()
        asked = self._asked
        if asked is None:
            return
        await asyncio.wait((asked,), timeout=self._timing.patience_s)
        if asked.done() and asked is self._asked:
            self._asked = None
            with suppress(EngineDeadError):  # the last look stands; the phase tells that there will be no other
                self._snapshot, self._snapshot_time = asked.result(), self._clock()

    def _get_key_ids(self, snapshot: EngineSnapshot | None) -> dict[str, str]:
        requests = () if snapshot is None else (*snapshot.running, *snapshot.waiting)
        records = map(self._engine_client.get_record, (request.request_id for request in requests))
        return {record.request_id: record.key_id for record in records if record is not None and record.key_id}
