"""What /metrics asks of the engine at each scrape: a stuck one tells nothing by itself."""

from __future__ import annotations

from server.engine_client import EngineClient
from server.lifecycle.drain import Drain
from server.readiness import assess_readiness


def read_engine_gauges(engine_client: EngineClient, drain: Drain) -> dict[str, float]:
    """Return gauges by name, as they are now.

    Args:
        engine_client: Asked.
        drain: Begun, it makes the server not ready.
    """
    return {
        "pointsman:ready": assess_readiness(engine_client, drain).is_ready,
        "pointsman:seconds_since_progress": engine_client.seconds_since_progress(),
        "pointsman:num_live_requests": engine_client.num_live,
    }
