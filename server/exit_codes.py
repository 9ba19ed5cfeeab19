"""How a process of Pointsman ends: one table for all commands."""

from __future__ import annotations

from enum import IntEnum

from engine_core import EngineFailure


class ExitCode(IntEnum):
    """What the process's exit code says. Source: sysexits.h, and 128 + SIGINT.

    Attributes:
        OK: Everything was done; of a server: it was told to stop, and has.
        SOME_FAILED: A batch is complete, but some of its lines hold an error; or some requests of a load failed.
        USAGE: A flag or its environment variable has a value that does not work; of a load: nothing answers there.
        BAD_MODEL: The model's files are incomplete or of no supported kind.
        NO_MODEL: The model is not there, or cannot be downloaded.
        PORT_TAKEN: The address cannot be listened on.
        ENGINE_DIED: The model cannot be loaded, or the engine died while it ran. Worth a restart.
        STUCK: A step of the engine, or the server's own event loop, did not come to an end. Worth a restart.
        FILE_ERROR: A batch's file, or a load's JSON, cannot be read or written.
        OUT_OF_MEMORY: The machine's memory does not hold the model or its KV cache; it may at another time.
        INTERRUPTED: A signal ended it before it was done; of a server: the second signal.
    """

    OK = 0
    SOME_FAILED = 1
    USAGE = 64
    BAD_MODEL = 65
    NO_MODEL = 66
    PORT_TAKEN = 69
    ENGINE_DIED = 70
    STUCK = 71
    FILE_ERROR = 74
    OUT_OF_MEMORY = 75
    INTERRUPTED = 130


def code_of_failure(failure: EngineFailure | None) -> ExitCode:
    """Return how a process ends whose engine has died.

    Args:
        failure: Of what; None = nobody knows.
    """
    return _OF_FAILURES.get(failure, ExitCode.ENGINE_DIED)


_OF_FAILURES: dict[EngineFailure | None, ExitCode] = {
    EngineFailure.CONFIG: ExitCode.USAGE,
    EngineFailure.CHECKPOINT: ExitCode.BAD_MODEL,
    EngineFailure.MEMORY: ExitCode.OUT_OF_MEMORY,
}
