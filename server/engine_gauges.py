"""What /metrics asks of the engine at each scrape: a stuck one tells nothing by itself."""

from __future__ import annotations

from engine_core import EnginePhase
from server.engine_client import MAX_HEARTBEAT_AGE_S, EngineClient
from server.lifecycle.drain import Drain


def read_engine_gauges(engine_client: EngineClient, drain: Drain) -> dict[str, float]:
    """Return gauges by name, as they are now.

    Args:
        engine_client: Asked.
        drain: Begun, it makes the server not ready.
    """
    age_s = engine_client.seconds_since_progress()
    is_fine = engine_client.state.phase is EnginePhase.READY and age_s <= MAX_HEARTBEAT_AGE_S
    return {
        "pointsman:ready": is_fine and drain.refusal is None,
        "pointsman:seconds_since_progress": age_s,
        "pointsman:num_live_requests": engine_client.num_live,
    }
