from __future__ import annotations

import pytest
from fastapi import FastAPI

from engine_core import EnginePhase
from server.routes.probes import ProbeRoute, create_probe_router, probe
from tests.server.fake_engine_client import FakeEngineClient, create_state
from tests.server.http_helpers import build_app, connect, list_routes

PATHS = sorted({route.path for route in list_routes(build_app(FakeEngineClient())) if isinstance(route, ProbeRoute)})


def test_the_probes_are_found() -> None:
    assert {"/health", "/ready", "/readyz", "/ping", "/version", "/metrics", "/load", "/get_model_info"} <= set(PATHS)


@pytest.mark.parametrize("phase", [EnginePhase.READY, EnginePhase.DEAD])
@pytest.mark.parametrize("path", PATHS)
async def test_head_tells_what_get_tells(path: str, phase: EnginePhase) -> None:
    async with connect(build_app(FakeEngineClient(state=create_state(phase)))) as client:
        got, head = await client.get(path), await client.head(path)
    assert head.status_code == got.status_code
    assert head.status_code == 200 or (phase is EnginePhase.DEAD and path in ("/health", "/ready", "/readyz"))
    assert {**head.headers, "x-request-id": ""} == {**got.headers, "x-request-id": ""}


@pytest.mark.parametrize("path", PATHS)
async def test_another_method_is_told_which_there_are(path: str) -> None:
    async with connect(build_app(FakeEngineClient())) as client:
        response = await client.delete(path)
    assert response.status_code == 405
    allowed = {"GET", "HEAD", "POST"} if path == "/ping" else {"GET", "HEAD"}
    assert set(response.headers["allow"].split(", ")) == allowed


async def test_a_probe_answers_under_all_its_names_and_is_documented_under_the_first() -> None:
    router = create_probe_router("probes")

    @probe(router, "/one", "/two", other_methods=("POST",))
    async def tell() -> dict[str, int]:
        """Tell."""
        return {"one": 1}

    app = FastAPI()
    app.include_router(router)
    async with connect(app) as client:
        for path in ("/one", "/two"):
            assert (await client.get(path)).json() == (await client.post(path)).json() == {"one": 1}
            assert (await client.head(path)).status_code == 200
    paths = app.openapi()["paths"]
    assert [(path, *operations) for path, operations in paths.items()] == [("/one", "get")]
    assert paths["/one"]["get"]["tags"] == ["probes"]
