import pytest

from engine_core import EnginePhase
from server.engine_reading import read_engine
from server.records import EngineReading
from server.routes.ops import MAX_HEARTBEAT_AGE_S
from tests.server.fake_engine_client import FakeEngineClient, create_state


@pytest.mark.parametrize(
    ("phase", "age_s", "is_ready"),
    [
        (EnginePhase.READY, 0.0, True),
        (EnginePhase.READY, MAX_HEARTBEAT_AGE_S, True),
        (EnginePhase.READY, MAX_HEARTBEAT_AGE_S + 0.1, False),
        (EnginePhase.LOADING, 0.0, False),
        (EnginePhase.DEAD, 0.0, False),
    ],
)
def test_ready_means_what_the_probe_says(phase: EnginePhase, age_s: float, is_ready: bool) -> None:
    client = FakeEngineClient(state=create_state(phase))
    client.heartbeat_age_s = age_s
    assert read_engine(client) == EngineReading(is_ready=is_ready, seconds_since_progress=age_s, num_live=0)
