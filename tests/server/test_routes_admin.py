from __future__ import annotations

import asyncio
import logging
from typing import Any

import httpx
import pytest

from engine_core import EngineCommand, EngineDeadError, ResetPrefixCache, SetLimits
from server import reply_types as reply
from server.overload.limits import Limits
from server.routes import admin
from tests.server.fake_engine_client import FakeEngineClient
from tests.server.http_helpers import build_app, connect
from tests.server.metric_samples import read_samples
from tests.server.scheduled_app import ScheduledApp

LIMITS = Limits(
    max_num_seqs=8, max_num_batched_tokens=512, max_queued_requests=20, max_queued_tokens=3000, queue_timeout_s=600
)


async def test_limits_are_told_with_what_was_allocated_and_what_waits() -> None:
    async with connect(build_app(FakeEngineClient(), limits=LIMITS)) as client:
        response = await client.get("/admin/limits")
    assert reply.LimitsReply.model_validate_json(response.content)
    assert response.json() == {
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "max_queued_requests": 20,
        "max_queued_tokens": 3000,
        "allocated": {"max_num_seqs": 8, "max_num_batched_tokens": 512},
        "num_requests_queued": 0,
        "num_tokens_queued": 0,
    }


async def test_what_is_left_out_stays_and_only_the_engines_caps_go_to_the_engine() -> None:
    engine = FakeEngineClient()
    async with connect(build_app(engine, limits=LIMITS)) as client:
        first = await client.post("/admin/limits", json={"max_queued_requests": 0, "max_queued_tokens": 7})
        assert (first.json()["max_queued_requests"], first.json()["max_queued_tokens"]) == (0, 7)
        assert engine.commands == []
        second = await client.post("/admin/limits", json={"max_num_seqs": 2})
        assert engine.commands == [SetLimits(max_num_seqs=2)]
        assert second.json() == {**first.json(), "max_num_seqs": 2}
        await client.post("/admin/limits", json={"max_num_batched_tokens": 64, "max_num_seqs": 3})
        assert engine.commands[1:] == [SetLimits(3, 64)]
        assert (await client.post("/admin/limits", json={})).json() == (await client.get("/admin/limits")).json()


async def test_the_log_tells_what_an_operator_changed(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="server.routes.admin"):
        async with connect(build_app(FakeEngineClient(), limits=LIMITS)) as client:
            await client.get("/admin/limits")
            await client.post("/admin/limits", json={})
            await client.post("/admin/limits", json={"max_num_seqs": 2, "max_queued_tokens": 7})
            await client.post("/reset_prefix_cache")
            await client.post("/abort", json={"request_ids": ["nobody"]})
    assert [record.getMessage() for record in caplog.records if record.name == "server.routes.admin"] == [
        "limits set: max_num_seqs = 2, max_queued_tokens = 7 by an operator",
        "prefix cache emptied by an operator",
    ]


async def test_what_the_engine_refuses_changes_nothing_and_is_told_by_field() -> None:
    engine = FakeEngineClient()

    def refuse(command: EngineCommand) -> bool:
        raise ValueError("`max_num_seqs` may be 1 to 8 on this server, not 9.")

    engine.obey = refuse
    async with connect(build_app(engine, limits=LIMITS)) as client:
        before = (await client.get("/admin/limits")).json()
        response = await client.post("/admin/limits", json={"max_num_seqs": 9, "max_queued_requests": 1})
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["param"], error["code"]) == ("max_num_seqs", "invalid_value")
        assert "1 to 8" in error["message"]
        assert (await client.get("/admin/limits")).json() == before


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_num_seq": 3}, "max_num_seq"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": "3"}, "max_num_seqs"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens"),
        ({"max_queued_requests": -1}, "max_queued_requests"),
        ({"max_queued_tokens": 1.5}, "max_queued_tokens"),
        ({"max_queued_tokens": 2**31}, "max_queued_tokens"),
        ({"max_queued_requests": 10**300}, "max_queued_requests"),
        ({"max_num_seqs": 10**300}, "max_num_seqs"),
        ({"queue_timeout_s": 3}, "queue_timeout_s"),
        ([], None),
    ],
)
async def test_a_limit_that_is_misspelt_or_no_number_is_refused(body: Any, param: str | None) -> None:
    async with connect(build_app(FakeEngineClient(), limits=LIMITS)) as client:
        response = await client.post("/admin/limits", json=body)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == param
        assert (await client.get("/admin/limits")).json()["max_num_seqs"] == 8


@pytest.mark.parametrize(
    ("query", "reset_running"),
    [("", False), ("?reset_running=true", True), ("?reset_running_requests=1", True), ("?reset_running=False", False)],
)
@pytest.mark.parametrize("is_done", [True, False])
async def test_the_prefix_cache_is_reset_under_vllms_name(query: str, reset_running: bool, is_done: bool) -> None:
    engine = FakeEngineClient()
    engine.obey = lambda command: is_done
    async with connect(build_app(engine)) as client:
        response = await client.post(f"/reset_prefix_cache{query}")
        assert (response.status_code, response.json()) == (200, {"success": is_done})
        assert engine.commands == [ResetPrefixCache(reset_running)]
        assert (await client.post("/reset_prefix_cache?reset_running=maybe")).status_code == 400


async def test_an_engine_that_does_not_come_to_it_is_a_503_and_a_dead_one_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin, "_ANSWER_S", 0.01)
    app = ScheduledApp()  # takes no step
    async with client_of(app) as client:
        response = await client.post("/reset_prefix_cache")
        assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
        assert "nothing was changed" not in response.text, "it may have begun with it"
        assert app.engine.scheduler.kv_cache.enable_prefix_caching

    def die(command: EngineCommand) -> bool:
        raise EngineDeadError("gone")

    engine = FakeEngineClient()
    engine.obey = die
    async with connect(build_app(engine, limits=LIMITS)) as client:
        response = await client.post("/admin/limits", json={"max_num_seqs": 3})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")


async def test_an_id_of_nobody_is_not_found_and_no_ids_are_none() -> None:
    async with connect(build_app(FakeEngineClient())) as client:
        response = await client.post("/abort", json={"request_ids": ["cmpl-1"]})
        assert (response.status_code, response.json()["error"]["code"]) == (404, "not_found")
        for body in ({"request_ids": []}, {"request_ids": [""]}, {"request_ids": ["x"] * 1001}, {"ids": ["x"]}, {}):
            assert (await client.post("/abort", json=body)).status_code == 400, body


# ---------------------------------------------------------------------- over the real scheduler
def client_of(app: ScheduledApp) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(app.app), base_url="http://server")


async def command(app: ScheduledApp, client: httpx.AsyncClient, path: str, body: Any = None) -> dict[str, Any]:
    """Ask for a command and step the engine, so that it comes to it."""
    task = asyncio.create_task(client.post(path, json=body))
    await app.engine.has_command.wait()
    app.engine.has_command.clear()
    await app.step()
    response = await task
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


async def test_b20_lowering_a_cap_drains_and_raising_it_works_at_once() -> None:
    app = ScheduledApp(limits=Limits(max_num_seqs=4, max_num_batched_tokens=4096), max_num_seqs=4)
    scheduler = app.engine.scheduler
    callers = [await app.ask(max_tokens=12) for _ in range(3)]
    await app.step(2)
    async with client_of(app) as client:
        assert (await command(app, client, "/admin/limits", {"max_num_seqs": 1}))["max_num_seqs"] == 1
        late = await app.ask(max_tokens=3)
        await app.step(3)
        assert (len(scheduler.running), len(scheduler.waiting)) == (3, 1), "nobody is preempted, nobody admitted"
        assert read_samples(app.metrics)["pointsman:max_num_seqs", ""] == 1
        assert (await command(app, client, "/admin/limits", {"max_num_seqs": 4}))["allocated"]["max_num_seqs"] == 4
        await app.step()
        assert (len(scheduler.running), len(scheduler.waiting)) == (4, 0)
        response = await asyncio.gather(
            client.post("/admin/limits", json={"max_num_seqs": 5}), keep_stepping(app, app.engine.has_command)
        )
        assert response[0].status_code == 400
    await app.finish(*callers, late)
    assert app.engine.is_empty


async def keep_stepping(app: ScheduledApp, has_command: asyncio.Event) -> None:
    await has_command.wait()
    has_command.clear()
    await app.step()


async def test_the_prefix_cache_is_really_empty_afterwards_and_the_running_go_on() -> None:
    app = ScheduledApp()
    caller = await app.ask(prompt="abcdefghijkl", max_tokens=6)
    await app.step(2)
    async with client_of(app) as client:
        assert await command(app, client, "/reset_prefix_cache") == {"success": False}
        assert await command(app, client, "/reset_prefix_cache?reset_running=true") == {"success": True}
    await app.finish(caller)
    assert caller.status == 200


@pytest.mark.parametrize("path", ["/abort", "/abort_requests"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_request_is_ended_by_its_label_and_by_its_answers_id(path: str, stream: bool) -> None:
    app = ScheduledApp()
    named = await app.ask(headers={"x-request-id": "mine"}, stream=stream, max_tokens=500, n=2)
    other = await app.ask(stream=True, max_tokens=500)
    await app.step(3)
    other_id = other.messages[1]["body"].decode().split('"id":"')[1].split('"')[0]
    async with client_of(app) as client:
        response = await client.post(path, json={"request_ids": ["mine", other_id, "nobody"]})
    assert response.json() == {"num_aborted": 2, "not_found": ["nobody"]}
    await asyncio.gather(named.task, other.task)
    await app.step()
    assert app.engine.is_empty
    if stream:
        assert named.read_chunks()[-1]["error"]["code"] == "request_cancelled"
    else:
        assert (named.status, named.headers["x-should-retry"]) == (409, "false")
    assert other.read_chunks()[-1]["error"]["code"] == "request_cancelled"
