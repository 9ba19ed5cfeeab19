"""EngineClient: how the server's thread reaches the engine, whatever stands behind it."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Collection

from engine_core import EngineCommand, EngineSnapshot, EngineState
from server.errors import RequestError
from server.generation import GenerationOutput, GenerationRequest
from server.overload.backlog import Backlog
from server.records import RequestRecord

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
            RequestError: It was ended by ``fail_requests``.
        """

    @abstractmethod
    def fail_requests(self, request_ids: Collection[str], error: RequestError) -> int:
        """End those of these requests that are live with an error, abort them, and return how many there were."""

    @abstractmethod
    async def command(self, command: EngineCommand) -> bool:
        """Have the engine carry out a command between two steps; return whether it was done.

        Raises:
            ValueError: It cannot be; the message is a sentence that says why.
            EngineDeadError: The engine does not run, or died before it came to it.
        """

    @property
    @abstractmethod
    def backlog(self) -> Backlog:
        """What waits for the engine, and how fast it works."""

    @property
    @abstractmethod
    def state(self) -> EngineState:
        """The engine's state now."""

    @property
    @abstractmethod
    def num_live(self) -> int:
        """Requests that have not ended: those in the engine, running or waiting."""

    @abstractmethod
    def take_snapshot(self) -> asyncio.Future[EngineSnapshot] | None:
        """Ask for a look at the requests and blocks, between two steps; None unless the engine is ready.

        Returns:
            Gets it, or an EngineDeadError if the engine ends first.
        """

    @abstractmethod
    def get_record(self, request_id: str) -> RequestRecord | None:
        """Return what is noted of a live request; None where there is none of that id."""

    @abstractmethod
    def seconds_since_progress(self) -> float:
        """Age of the engine's heartbeat while it has work in hand; 0 when idle."""
