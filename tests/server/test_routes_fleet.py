from __future__ import annotations

import asyncio

import pytest

from engine_core import EnginePhase
from server.generation import GenerationRequest
from tests.server.fake_engine_client import FakeEngineClient, ScriptItem, create_state, say
from tests.server.http_helpers import MODEL, build_app, connect


async def test_load_counts_the_requests_in_hand_and_returns_to_zero() -> None:
    gate, has_both = asyncio.Event(), asyncio.Event()

    def hold(request: GenerationRequest) -> list[ScriptItem]:
        if len(engine.requests) == 2:
            has_both.set()
        return [gate, *say("done")]

    engine = FakeEngineClient(hold)
    async with connect(build_app(engine)) as client:

        async def get_load() -> tuple[object, object]:
            return (await client.get("/load")).json(), (await client.get("/get_load")).json()

        assert await get_load() == ({"server_load": 0}, {"load": 0})
        # Two prompts of one HTTP request are two requests to the engine.
        post = asyncio.create_task(client.post("/v1/completions", json={"prompt": ["a", "b"]}))
        await asyncio.wait_for(has_both.wait(), 5)
        assert await get_load() == ({"server_load": 2}, {"load": 2})
        gate.set()
        assert (await post).status_code == 200
        assert await get_load() == ({"server_load": 0}, {"load": 0})


async def test_routers_read_what_this_worker_is() -> None:
    async with connect(build_app(FakeEngineClient())) as client:
        info = (await client.get("/get_server_info")).json()
        again = (await client.get("/get_server_info")).json()
        worker = (await client.get("/server_info")).json()
        model = (await client.get("/model_info")).json()
        same_model = (await client.get("/get_model_info")).json()
        sleeping = (await client.get("/is_sleeping")).json()
    assert (info["model_path"], info["kv_block_size"]) == (MODEL, 8)
    assert info["instance_id"] == again["instance_id"] != ""
    assert set(info) == {"model_path", "instance_id", "kv_block_size"}  # more of them break vllm-router
    assert model == same_model == {"model_path": MODEL, "is_generation": True, "architectures": []}
    assert worker == {**model, "served_model_name": MODEL, "version": "1.2.3", "tp_size": 1, "dp_size": 1}
    assert sleeping == {"is_sleeping": False}


async def test_the_block_size_is_not_made_up_while_the_model_loads() -> None:
    engine = FakeEngineClient(state=create_state(EnginePhase.LOADING, block_size=0))
    async with connect(build_app(engine)) as client:
        response = await client.get("/get_server_info")
    assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")


@pytest.mark.parametrize(
    ("method", "path"),
    [("HEAD", "/health"), ("HEAD", "/ready"), ("HEAD", "/metrics"), ("POST", "/ping"), ("GET", "/readyz")],
)
async def test_probes_answer_in_the_ways_that_others_ask(method: str, path: str) -> None:
    async with connect(build_app(FakeEngineClient())) as client:
        assert (await client.request(method, path)).status_code == 200


async def test_a_load_balancers_probe_sees_the_engines_death_by_head_too() -> None:
    async with connect(build_app(FakeEngineClient(state=create_state(EnginePhase.DEAD)))) as client:
        assert (await client.head("/health")).status_code == 503
        assert (await client.get("/readyz")).status_code == 503
