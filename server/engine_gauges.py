"""What /metrics asks of the engine at each scrape: a stuck one tells nothing by itself."""

from __future__ import annotations

from engine_core import EnginePhase
from server.engine_client import EngineClient
from server.routes.ops import MAX_HEARTBEAT_AGE_S


def read_engine_gauges(engine_client: EngineClient, *, max_num_seqs: int) -> dict[str, float]:
    """Return gauges by name, as they are now.

    Args:
        engine_client: Asked.
        max_num_seqs: Requests that may run at once.
    """
    age_s = engine_client.seconds_since_progress()
    return {
        "pointsman:ready": engine_client.state.phase is EnginePhase.READY and age_s <= MAX_HEARTBEAT_AGE_S,
        "pointsman:seconds_since_progress": age_s,
        "pointsman:num_live_requests": engine_client.num_live,
        "pointsman:max_num_seqs": max_num_seqs,
    }
