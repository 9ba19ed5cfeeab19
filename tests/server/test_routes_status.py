from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest

from server.status.document import FIGURES
from server.status.feed import MAX_VIEWERS
from tests.server.fake_engine_client import FakeEngineClient
from tests.server.http_helpers import FakeMetrics, build_app, connect, serve
from tests.server.metric_samples import read_samples
from tests.server.scheduled_app import ScheduledApp
from tests.server.status_samples import create_row, create_snapshot


def create_client() -> FakeEngineClient:
    client = FakeEngineClient()
    client.snapshot = create_snapshot(create_row("r"))
    return client


async def get_document(app: Any) -> dict[str, Any]:
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as http:
        response = await http.get("/status.json")
    assert response.status_code == 200
    value: dict[str, Any] = response.json()
    return value


async def test_the_page_holds_no_data_and_says_what_it_may_do() -> None:
    client = create_client()
    async with connect(build_app(client)) as http:
        response = await http.get("/status")
        head = await http.head("/status")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert "script-src 'sha256-" in response.headers["content-security-policy"]
    assert response.headers["cache-control"] == "no-store"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert "fake-model" not in response.text and client.snapshots_asked == []
    assert head.headers["content-length"] == response.headers["content-length"]


async def test_the_servers_bare_address_leads_to_the_page() -> None:
    async with connect(build_app(create_client())) as http:
        response = await http.get("/")
    assert (response.status_code, response.headers["location"]) == (307, "/status")


async def test_one_document_can_be_had_without_a_stream() -> None:
    document = await get_document(build_app(create_client()))
    assert document["server"]["model"] == "org/fake-model" and document["server"]["version"] == "1.2.3"
    assert document["engine"]["running"][0]["id"] == "r"


async def test_nobody_counts_who_looks() -> None:
    metrics = FakeMetrics()
    async with connect(build_app(create_client(), metrics=metrics)) as http:
        for path in ("/status", "/status.json"):
            await http.get(path)
    assert metrics.http == []


async def test_events_come_over_a_real_connection_and_its_end_ends_the_work() -> None:
    client = create_client()
    app = build_app(client)
    feed = app.state.status_feed
    async with serve(app) as url, httpx.AsyncClient(base_url=url) as http:
        async with http.stream("GET", "/status/events") as response:
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            assert response.headers["cache-control"] == "no-cache"
            lines = response.aiter_lines()
            event = json.loads((await anext(lines)).removeprefix("data: "))
            assert await anext(lines) == ""
            assert event["engine"]["running"][0]["id"] == "r"
            ticker = feed._ticker
            assert feed.num_viewers == 1 and ticker is not None
        done, _ = await asyncio.wait((ticker,), timeout=10)
        assert done and ticker.cancelled() and feed.num_viewers == 0


async def test_one_viewer_too_many_gets_a_503() -> None:
    app = build_app(create_client())
    app.state.status_feed.num_viewers = MAX_VIEWERS
    async with connect(app) as http:
        response = await http.get("/status/events")
    assert response.status_code == 503 and response.headers["retry-after"] == "10"
    assert response.json()["error"]["code"] == "too_many_viewers"


async def test_a_server_that_stops_does_not_wait_for_its_viewers() -> None:
    app = build_app(create_client())
    async with (
        serve(app) as url,
        httpx.AsyncClient(base_url=url) as http,
        http.stream("GET", "/status/events") as response,
    ):
        lines = response.aiter_lines()
        await anext(lines)
        app.state.status_feed.close()
        assert [line async for line in lines if line] == [], "the stream ends, and no error is told"


@pytest.mark.parametrize("num_steps", [1, 4])
async def test_page_and_metrics_tell_the_same(num_steps: int) -> None:
    scheduled = ScheduledApp(max_num_seqs=2, num_blocks=20)
    callers = [await scheduled.ask(prompt="abcdefgh" * 2, max_tokens=12, stream=True) for _ in range(4)]
    await scheduled.step(num_steps)
    document, page = await get_document(scheduled.app), read_samples(scheduled.metrics)
    for name, (metric, *labels) in FIGURES.items():
        if not name.endswith("per_s"):  # the clock goes on between the two
            own = ",".join(f"finished_reason={label}" for label in labels)
            assert document["figures"][name] == round(page[metric, own], 4), name
    engine, blocks = document["engine"], document["blocks"]
    assert (engine["num_running"], engine["num_waiting"]) == (2, 2)
    assert (document["figures"]["running"], document["figures"]["waiting"]) == (2, 2)
    assert blocks["used"] / blocks["total"] == pytest.approx(document["figures"]["kv_usage"], abs=1e-4)
    assert [row["waits_for"].split(":")[0] for row in engine["waiting"]] == [
        "max_num_seqs",
        f"behind request {engine['waiting'][0]['id']}",
    ]
    assert sum(output for _, output, _ in document["steps"]) == document["figures"]["output_tokens"]
    assert len(document["steps"]) == page["vllm:iteration_tokens_total_count", ""] == num_steps
    await scheduled.finish(*callers)
    document = await get_document(scheduled.app)
    assert document["engine"]["running"] == [] and document["figures"]["ended_length"] == 4
    assert document["blocks"]["used"] == 0 and document["blocks"]["cached"] > 0
