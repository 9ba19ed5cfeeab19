"""What the server asks of an engine in its own process. ``engine_core.Engine`` is one; tests bring others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Protocol

from engine_core import EngineCommand, EngineCoreOutputs, EngineCoreRequest, EngineSnapshot, EngineState

Publish = Callable[[EngineCoreOutputs], None]
OnState = Callable[[EngineState], None]


class EngineHandle(Protocol):
    """An engine on a thread of its own. Every method may be called from any thread; only ``shutdown`` waits."""

    @property
    def state(self) -> EngineState:
        """The state now."""

    def start(self) -> None:
        """Start the thread: load, then run."""

    def add_request(self, request: EngineCoreRequest) -> None:
        """Hand over an admitted request.

        Raises:
            EngineDeadError: The engine does not run.
        """

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        """End these requests; unknown ids are ignored."""

    def ask(self, command: EngineCommand) -> Future[bool]:
        """Have a command carried out between two steps.

        Returns:
            Whether it was done; a ValueError says why it cannot be, an EngineDeadError that nobody is left to do it.

        Raises:
            EngineDeadError: The engine does not run.
        """

    def take_snapshot(self) -> Future[EngineSnapshot] | None:
        """Ask for a look at the requests and blocks, after the current step; None unless the engine is ready.

        Returns:
            Gets it, or an EngineDeadError if the engine ends first.
        """

    def seconds_since_progress(self) -> float:
        """Age of the heartbeat while there is work in hand, else 0."""

    def shutdown(self, timeout_s: float) -> bool:
        """Stop after the current step; wait for the thread at most this long.

        Returns:
            Whether no thread of the engine is left.
        """


# Makes the engine, given where its outputs and its states go. Both are called on the engine's thread.
EngineFactory = Callable[[Publish, OnState], EngineHandle]
