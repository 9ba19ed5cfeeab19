"""Whether requests should be sent here now: the one answer that /ready, /metrics and the status page give."""

from __future__ import annotations

from dataclasses import dataclass

from engine_core import EnginePhase
from server.engine_client import MAX_HEARTBEAT_AGE_S, EngineClient
from server.errors import ErrorKind, RequestError
from server.lifecycle.drain import Drain


@dataclass(frozen=True, slots=True)
class Readiness:
    """The answer.

    Attributes:
        status: In a word: ready, loading, stuck, draining, engine_stuck, stopped or dead.
        error: Why not; None = they should.
    """

    status: str
    error: RequestError | None = None

    @property
    def is_ready(self) -> bool:
        return self.error is None


def assess_readiness(engine_client: EngineClient, drain: Drain) -> Readiness:
    """Return whether requests should be sent here now; load never changes it.

    Args:
        engine_client: Must be loaded, and not stand still.
        drain: Must not have begun; where it has, it is the reason, whatever becomes of the engine.
    """
    phase = engine_client.state.phase
    if drain.refusal is not None:
        return Readiness(drain.refusal.kind.value, drain.refusal)
    if phase is EnginePhase.LOADING:
        return Readiness(phase.value, RequestError("The model is still loading.", kind=ErrorKind.NOT_READY))
    if phase is not EnginePhase.READY:
        return Readiness(phase.value, RequestError("The engine has stopped.", kind=ErrorKind.ENGINE_DEAD))
    age_s = engine_client.seconds_since_progress()
    if age_s > MAX_HEARTBEAT_AGE_S:
        message = f"The engine has work but has made no progress for {age_s:.1f} s."
        return Readiness("stuck", RequestError(message, kind=ErrorKind.NOT_READY))
    return Readiness(phase.value)
