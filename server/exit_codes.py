"""How a process of Pointsman ends: one table for all commands."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What the process's exit code says. Source: sysexits.h, and 128 + SIGINT.

    Attributes:
        OK: Everything was done; of a server: it was told to stop, and has.
        SOME_FAILED: A batch is complete, but some of its lines hold an error; or some requests of a load failed.
        USAGE: A flag or its environment variable has a value that does not work; of a load: nothing answers there.
        BAD_MODEL: The model's files are incomplete or of no supported kind.
        NO_MODEL: The model is not there, or cannot be downloaded.
        PORT_TAKEN: The address cannot be listened on.
        ENGINE_DIED: The model cannot be loaded, or the engine died while it ran.
        FILE_ERROR: A batch's file, or a load's JSON, cannot be read or written.
        INTERRUPTED: A signal ended it before it was done.
    """

    OK = 0
    SOME_FAILED = 1
    USAGE = 64
    BAD_MODEL = 65
    NO_MODEL = 66
    PORT_TAKEN = 69
    ENGINE_DIED = 70
    FILE_ERROR = 74
    INTERRUPTED = 130
