"""What /metrics asks of the engine at each scrape."""

from __future__ import annotations

from engine_core import EnginePhase
from server.engine_client import EngineClient
from server.records import EngineReading
from server.routes.ops import MAX_HEARTBEAT_AGE_S


def read_engine(engine_client: EngineClient) -> EngineReading:
    """Return the engine's state now; ready means what /ready means."""
    age_s = engine_client.seconds_since_progress()
    return EngineReading(
        is_ready=engine_client.state.phase is EnginePhase.READY and age_s <= MAX_HEARTBEAT_AGE_S,
        seconds_since_progress=age_s,
        num_live=engine_client.num_live,
    )
