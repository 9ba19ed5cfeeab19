"""EngineClient: how the server's thread reaches the engine, whatever stands behind it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator

from engine_core import EngineState
from server.generation import GenerationOutput, GenerationRequest

# An engine with work in hand whose heart has not beaten for this long should get no new requests.
MAX_HEARTBEAT_AGE_S = 2.0


class EngineClient(ABC):
    """The engine as routes see it."""

    @abstractmethod
    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationOutput, None]:
        """Run one request and yield its outputs; the last has a finish_reason.

        Closing the iterator early aborts the request in the engine within one step.

        Raises:
            EngineDeadError: The engine has died, before or while this request ran.
            ServerStoppingError: The server was told to stop before this request ended.
        """

    @property
    @abstractmethod
    def state(self) -> EngineState:
        """The engine's state now."""

    @property
    @abstractmethod
    def num_live(self) -> int:
        """Requests that have not ended: those in the engine, running or waiting."""

    @abstractmethod
    def seconds_since_progress(self) -> float:
        """Age of the engine's heartbeat while it has work in hand; 0 when idle."""
