import pytest

from engine_core import EnginePhase
from server.engine_client import MAX_HEARTBEAT_AGE_S
from server.engine_gauges import read_engine_gauges
from server.errors import ErrorKind, RequestError
from server.lifecycle.drain import Drain
from tests.server.fake_engine_client import FakeEngineClient, create_state


@pytest.mark.parametrize(
    ("phase", "age_s", "is_ready"),
    [
        (EnginePhase.READY, 0.0, 1),
        (EnginePhase.READY, MAX_HEARTBEAT_AGE_S, 1),
        (EnginePhase.READY, MAX_HEARTBEAT_AGE_S + 0.1, 0),
        (EnginePhase.LOADING, 0.0, 0),
        (EnginePhase.DEAD, 0.0, 0),
    ],
)
def test_ready_means_what_the_probe_says(phase: EnginePhase, age_s: float, is_ready: int) -> None:
    client = FakeEngineClient(state=create_state(phase))
    client.heartbeat_age_s = age_s
    assert read_engine_gauges(client, Drain()) == {
        "pointsman:ready": is_ready,
        "pointsman:seconds_since_progress": age_s,
        "pointsman:num_live_requests": 0,
    }


def test_a_server_that_drains_is_not_ready() -> None:
    drain = Drain()
    drain.begin(RequestError("The server is shutting down.", kind=ErrorKind.DRAINING))
    assert not read_engine_gauges(FakeEngineClient(), drain)["pointsman:ready"]
