from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from engine_core import EngineDeadError, EnginePhase
from server.errors import ErrorKind, RequestError
from server.lifecycle.drain import Drain
from server.status.feed import MAX_VIEWERS, FeedTiming, StatusFeed, StatusSources
from tests.server.fake_engine_client import FakeEngineClient, create_state
from tests.server.metric_samples import create_record
from tests.server.status_samples import ABOUT, NoFigures, create_row, create_snapshot

QUICK = FeedTiming(interval_s=0.0, patience_s=0.0)


def create_feed(client: FakeEngineClient, timing: FeedTiming = QUICK) -> StatusFeed:
    return StatusFeed(engine_client=client, figures=NoFigures(), sources=StatusSources(), about=ABOUT, timing=timing)


def create_client() -> FakeEngineClient:
    client = FakeEngineClient()
    client.snapshot = create_snapshot(create_row("r"))
    return client


def decode(event: bytes) -> dict[str, Any]:
    assert event.startswith(b"data: {") and event.endswith(b"}\n\n") and event.count(b"\n") == 2
    value: dict[str, Any] = json.loads(event.removeprefix(b"data: "))
    return value


async def test_a_viewer_gets_documents_one_after_another() -> None:
    client = create_client()
    feed = create_feed(client)
    async with aclosing(feed.watch()) as events:
        first = decode(await anext(events))
        client.snapshot = create_snapshot(create_row("r"), create_row("s"))
        while len(decode(await anext(events))["engine"]["running"]) == 1:
            pass
    assert first["engine"]["running"][0]["id"] == "r" and first["blocks"]["used"] == 2
    assert set(first) == {"server", "figures", "latency", "engine", "blocks", "steps", "seconds", "errors"}


async def test_nothing_is_done_while_nobody_looks() -> None:
    client = create_client()
    feed = create_feed(client)
    await asyncio.sleep(0)
    assert client.snapshots_asked == []
    async with aclosing(feed.watch()) as events:
        await anext(events)
        ticker = feed._ticker
        assert ticker is not None and feed.num_viewers == 1
    num_asked = len(client.snapshots_asked)
    await asyncio.wait((ticker,))
    assert ticker.cancelled() and feed.num_viewers == 0 and feed._latest is None
    assert len(client.snapshots_asked) == num_asked


async def test_all_viewers_share_one_look_at_the_engine() -> None:
    client = create_client()
    feed = create_feed(client, FeedTiming(interval_s=3600.0))
    async with aclosing(feed.watch()) as one, aclosing(feed.watch()) as two:
        first, second = await asyncio.gather(anext(one), anext(two))
        assert first is second
    assert len(client.snapshots_asked) == 1


async def test_who_comes_later_need_not_wait_for_the_next_second() -> None:
    feed = create_feed(create_client(), FeedTiming(interval_s=3600.0))
    async with aclosing(feed.watch()) as one:
        first = await anext(one)
        async with aclosing(feed.watch()) as two:
            assert await anext(two) is first


async def test_one_viewer_too_many_is_told_so_and_a_place_that_is_left_is_free_again() -> None:
    feed = create_feed(create_client(), FeedTiming(interval_s=3600.0))
    viewers: list[AsyncGenerator[bytes, None]] = [feed.watch() for _ in range(MAX_VIEWERS)]
    for viewer in viewers:
        await anext(viewer)
    with pytest.raises(RequestError, match="16 viewers look at this page already") as refused:
        await anext(feed.watch())
    assert refused.value.kind is ErrorKind.TOO_MANY_VIEWERS
    await viewers.pop().aclose()
    viewers.append(feed.watch())
    await anext(viewers[-1])
    for viewer in viewers:
        await viewer.aclose()
    assert feed.num_viewers == 0


async def test_while_a_step_runs_the_last_look_stands_and_the_engine_is_not_asked_twice() -> None:
    now = 10.0
    client = create_client()
    feed = StatusFeed(
        engine_client=client,
        figures=NoFigures(),
        sources=StatusSources(),
        about=ABOUT,
        timing=QUICK,
        clock=lambda: now,
    )
    assert (await feed.take_document())["engine"]["age_s"] == 0.0
    client.snapshot = None
    for _ in range(3):
        now += 1.5
        document = await feed.take_document()
    assert document["engine"]["age_s"] == 4.5 and document["blocks"]["used"] == 2
    assert len(client.snapshots_asked) == 2
    client.snapshots_asked[-1].set_result(create_snapshot())
    assert (await feed.take_document())["engine"]["running"] == []


async def test_before_the_first_look_there_is_a_document_all_the_same() -> None:
    client = FakeEngineClient(state=create_state(EnginePhase.LOADING))
    document = await create_feed(client).take_document()
    assert document["server"]["phase"] == "loading"
    assert document["engine"] is None and document["blocks"] is None


async def test_the_phase_is_the_one_that_ready_tells() -> None:
    client, drain = create_client(), Drain()
    feed = StatusFeed(
        engine_client=client,
        figures=NoFigures(),
        sources=StatusSources(),
        about=ABOUT,
        drain=drain,
        timing=QUICK,
    )
    phases = [(await feed.take_document())["server"]["phase"]]
    client.heartbeat_age_s = 2.5
    phases.append((await feed.take_document())["server"]["phase"])
    drain.begin(RequestError("No more.", kind=ErrorKind.DRAINING))
    phases.append((await feed.take_document())["server"]["phase"])
    assert phases == ["ready", "stuck", "draining"]


async def test_a_look_that_fails_is_logged_and_the_next_one_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    client = FakeEngineClient()
    feed = create_feed(client, FeedTiming(interval_s=0.0, patience_s=10.0))
    viewer = feed.watch()
    first = asyncio.ensure_future(anext(viewer))
    for _ in range(5):
        await asyncio.sleep(0)
    with caplog.at_level(logging.ERROR):
        client.snapshot = create_snapshot(create_row("r"))
        client.snapshots_asked[0].set_exception(RuntimeError("no picture"))
        assert decode(await first)["engine"]["num_running"] == 1
    assert "could not be brought up to date" in caplog.text
    await viewer.aclose()


async def test_of_an_engine_that_dies_the_last_look_stands() -> None:
    client = create_client()
    feed = create_feed(client)
    assert (await feed.take_document())["engine"]["num_running"] == 1
    client.snapshot = None
    await feed.take_document()
    client.engine_state = create_state(EnginePhase.DEAD)
    client.snapshots_asked[-1].set_exception(EngineDeadError("device lost"))
    document = await feed.take_document()
    assert (document["server"]["phase"], document["engine"]["num_running"]) == ("dead", 1)


async def test_the_key_id_of_a_live_request_is_told() -> None:
    client = create_client()
    client.records["r"] = create_record(key_id="team-a")
    document = await create_feed(client).take_document()
    assert document["engine"]["running"][0]["key_id"] == "team-a"


async def test_closing_ends_every_stream_at_once() -> None:
    feed = create_feed(create_client(), FeedTiming(interval_s=3600.0))
    viewer = feed.watch()
    await anext(viewer)
    waiting = asyncio.ensure_future(anext(viewer, None))
    await asyncio.sleep(0)
    feed.close()
    assert await waiting is None
    assert feed.num_viewers == 0
    assert [event async for event in feed.watch()] == [], "and none begins"
