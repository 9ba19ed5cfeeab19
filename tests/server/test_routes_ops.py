from __future__ import annotations

import pytest

from engine_core import EnginePhase
from server.errors import ErrorKind, RequestError
from server.lifecycle.drain import Drain
from tests.server.fake_engine_client import FakeEngineClient, create_state
from tests.server.http_helpers import MODEL, build_app, connect


@pytest.mark.parametrize(
    ("phase", "health", "ready"),
    [
        (EnginePhase.LOADING, 200, 503),
        (EnginePhase.READY, 200, 200),
        (EnginePhase.STOPPED, 200, 503),
        (EnginePhase.DEAD, 503, 503),
    ],
)
async def test_probes_tell_the_engines_phase(phase: EnginePhase, health: int, ready: int) -> None:
    engine = FakeEngineClient(state=create_state(phase, detail="packing layer 3", progress=0.5))
    async with connect(build_app(engine)) as client:
        assert (await client.get("/health")).status_code == health
        response = await client.get("/ready")
        assert response.status_code == ready
        assert (await client.get("/ping")).status_code == 200
    if ready == 503:
        body = response.json()
        detail = "" if phase is EnginePhase.DEAD else "packing layer 3"  # why it died is for the log
        assert (body["status"], body["detail"], body["progress"]) == (phase.value, detail, 0.5)
        assert set(body["error"]) == {"message", "type", "param", "code"}
    assert ("retry-after" in response.headers) == (phase is EnginePhase.LOADING)


@pytest.mark.parametrize(("age_s", "status"), [(0.0, 200), (2.0, 200), (2.1, 503)])
async def test_an_engine_stuck_with_work_is_not_ready_but_healthy(age_s: float, status: int) -> None:
    engine = FakeEngineClient()
    engine.heartbeat_age_s = age_s
    async with connect(build_app(engine)) as client:
        ready = await client.get("/ready")
        assert (await client.get("/health")).status_code == 200
    assert ready.status_code == status
    assert status == 200 or "no progress for 2.1 s" in ready.json()["error"]["message"]
    assert ready.json()["status"] == ("ready" if status == 200 else "stuck")


@pytest.mark.parametrize("kind", [ErrorKind.DRAINING, ErrorKind.ENGINE_STUCK])
async def test_a_server_that_drains_is_not_ready_and_says_why_but_healthy(kind: ErrorKind) -> None:
    drain = Drain()
    engine = FakeEngineClient(state=create_state(EnginePhase.READY, detail="half of the free memory"))
    async with connect(build_app(engine, drain=drain)) as client:
        assert (await client.get("/ready")).status_code == 200
        drain.begin(RequestError("Going.", kind=kind))
        ready = await client.get("/ready")
        assert (await client.get("/health")).status_code == 200
        refused = await client.post("/v1/completions", json={"prompt": "hi"})
    assert (ready.status_code, ready.json()["status"], ready.json()["error"]["message"]) == (503, kind.value, "Going.")
    assert ready.json()["detail"] == ""  # how the KV cache was sized is not why
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, kind.value)
    assert refused.headers["x-request-id"]


async def test_version_and_metrics() -> None:
    async with connect(build_app(FakeEngineClient())) as client:
        assert (await client.get("/version")).json() == {"version": "1.2.3", "system_fingerprint": "fp_test"}
        metrics = await client.get("/metrics")
    assert metrics.content == b"up 1\n"
    assert metrics.headers["content-type"] == "text/plain; version=0.0.4"


async def test_models_are_listed_and_found_by_a_name_with_a_slash() -> None:
    async with connect(build_app(FakeEngineClient())) as client:
        listed = (await client.get("/v1/models")).json()
        found = await client.get(f"/v1/models/{MODEL}")
        missing = await client.get("/v1/models/other")
    assert listed["object"] == "list"
    (model,) = listed["data"]
    assert (model["id"], model["object"], model["owned_by"]) == (MODEL, "model", "pointsman")
    assert (model["root"], model["parent"]) == (MODEL, None)
    assert isinstance(model["created"], int)
    assert model["max_model_len"] == 64
    assert found.json() == model
    assert missing.status_code == 404
    assert missing.json()["error"]["code"] == "model_not_found"
