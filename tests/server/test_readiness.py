from __future__ import annotations

import pytest

from engine_core import EnginePhase
from server.engine_client import MAX_HEARTBEAT_AGE_S
from server.engine_gauges import read_engine_gauges
from server.errors import ErrorKind, RequestError
from server.lifecycle.drain import Drain
from server.readiness import assess_readiness
from server.status.document import About
from server.status.feed import FeedTiming, StatusFeed, StatusSources
from tests.server.fake_engine_client import FakeEngineClient, create_state
from tests.server.http_helpers import FakeMetrics, build_app, connect

STATES = [
    (EnginePhase.LOADING, 0.0, None, "loading"),
    (EnginePhase.LOADING, MAX_HEARTBEAT_AGE_S + 1, None, "loading"),
    (EnginePhase.READY, 0.0, None, "ready"),
    (EnginePhase.READY, MAX_HEARTBEAT_AGE_S, None, "ready"),
    (EnginePhase.READY, MAX_HEARTBEAT_AGE_S + 0.1, None, "stuck"),
    (EnginePhase.STOPPED, 0.0, None, "stopped"),
    (EnginePhase.DEAD, 0.0, None, "dead"),
    (EnginePhase.READY, 0.0, ErrorKind.DRAINING, "draining"),
    (EnginePhase.READY, MAX_HEARTBEAT_AGE_S + 1, ErrorKind.ENGINE_STUCK, "engine_stuck"),
    (EnginePhase.DEAD, 0.0, ErrorKind.DRAINING, "draining"),
]


def create_server(phase: EnginePhase, age_s: float, kind: ErrorKind | None) -> tuple[FakeEngineClient, Drain]:
    client, drain = FakeEngineClient(state=create_state(phase)), Drain()
    client.heartbeat_age_s = age_s
    if kind is not None:
        drain.begin(RequestError("Going.", kind=kind))
    return client, drain


@pytest.mark.parametrize(("phase", "age_s", "kind", "status"), STATES)
async def test_probe_metric_and_status_page_say_the_same(
    phase: EnginePhase, age_s: float, kind: ErrorKind | None, status: str
) -> None:
    client, drain = create_server(phase, age_s, kind)
    readiness = assess_readiness(client, drain)
    assert (readiness.status, readiness.is_ready) == (status, status == "ready")
    async with connect(build_app(client, drain=drain)) as http:
        probed = await http.get("/ready")
    feed = StatusFeed(
        engine_client=client,
        figures=FakeMetrics(),
        sources=StatusSources(),
        about=About("tiny", "1.2.3", 0.0),
        drain=drain,
        timing=FeedTiming(patience_s=0.0),
    )
    assert (await feed.take_document())["server"]["phase"] == status
    assert (probed.status_code == 200, probed.json()["status"]) == (readiness.is_ready, status)
    assert read_engine_gauges(client, drain)["pointsman:ready"] == readiness.is_ready


def test_a_drain_is_the_reason_whatever_the_engine_does() -> None:
    client, drain = create_server(EnginePhase.LOADING, 0.0, ErrorKind.DRAINING)
    assert assess_readiness(client, drain).error is drain.refusal
