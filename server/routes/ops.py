"""What operators and probes ask: /health, /ready, /ping, /version, /metrics."""

from __future__ import annotations

from typing import Any, Protocol

from fastapi import APIRouter, Response

from engine_core import EnginePhase, EngineState
from server.engine_client import EngineClient
from server.errors import ErrorKind, RequestError, build_error_body
from server.json_text import encode_json
from server.lifecycle.drain import Drain
from server.readiness import Readiness, assess_readiness
from server.routes.probes import create_probe_router, probe


class MetricsPage(Protocol):
    """What /metrics shows."""

    def render(self) -> tuple[bytes, str]:
        """Return the page and its content type."""


def build_router(
    *, engine_client: EngineClient, drain: Drain, metrics: MetricsPage, version: str, system_fingerprint: str
) -> APIRouter:
    """Return the router of these endpoints.

    Args:
        engine_client: Its state is what the probes tell.
        drain: Begun, it makes the server not ready.
        metrics: What /metrics shows.
        version: Of this server.
        system_fingerprint: As in replies.
    """
    router = create_probe_router("operations")

    # Not a thread hop away: probes must answer while every thread of the pools is busy.
    @probe(router, "/health")
    async def get_health() -> Response:
        """Tell whether the process can still serve; load never changes it."""
        state = engine_client.state
        if state.phase is EnginePhase.DEAD:
            error = RequestError("The engine has died; restart the server.", kind=ErrorKind.ENGINE_DEAD)
            return _build_status(state, error, state.phase.value)
        return _build_ok("ok")

    @probe(router, "/ready", "/readyz")
    async def get_ready() -> Response:
        """Tell whether requests should be sent here now; load never changes it."""
        return _tell_readiness(engine_client.state, assess_readiness(engine_client, drain))

    @probe(router, "/ping", other_methods=("POST",))
    async def ping() -> Response:
        """Answer, whatever the state."""
        return _build_ok("ok")

    @probe(router, "/version")
    async def get_version() -> dict[str, str]:
        """Tell what runs here."""
        return {"version": version, "system_fingerprint": system_fingerprint}

    # aiperf asks by HEAD whether there are any.
    @probe(router, "/metrics")
    async def get_metrics() -> Response:
        """Show the metrics in Prometheus' text format."""
        body, content_type = metrics.render()
        return Response(body, headers={"Content-Type": content_type})

    return router


def _tell_readiness(state: EngineState, readiness: Readiness) -> Response:
    if readiness.error is None:
        return _build_ok(readiness.status)
    return _build_status(state, readiness.error, readiness.status)


def _build_ok(status: str) -> Response:
    return Response(encode_json({"status": status}), media_type="application/json")


def _build_status(state: EngineState, error: RequestError, status: str) -> Response:
    body: dict[str, Any] = {
        "status": status,
        # Why the engine died is for the log: an exception's words tell of files and addresses. A ready one's tells how
        # its KV cache was sized, which is no reason not to be ready.
        "detail": "" if state.phase in (EnginePhase.DEAD, EnginePhase.READY) else state.detail,
        "progress": round(state.progress, 3),
        **build_error_body(error),
    }
    headers = {} if error.retry_after_s is None else {"Retry-After": str(error.retry_after_s)}
    return Response(encode_json(body), status_code=error.reply.status, headers=headers, media_type="application/json")
