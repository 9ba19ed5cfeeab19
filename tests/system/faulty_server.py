"""The real server with one fault: `FAULT=40:raise python -m tests.system.faulty_server serve ...`.

FAULT is the number of a step and what happens in it: raise an exception, hang, or eat memory until the process is
killed for it. With FAULT_ONCE=FILE it happens in one process only: the first makes the file.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from engine_core.model.runner import ModelRunner
from server.__main__ import main

_CHUNK_BYTES = 64 << 20


def _raise() -> None:
    raise RuntimeError("a fault was asked for in this step")


def _hang() -> None:
    time.sleep(3600)


def _eat() -> None:
    kept = []
    while True:
        kept.append(b"\1" * _CHUNK_BYTES)


FAULTS: dict[str, Callable[[], None]] = {"raise": _raise, "hang": _hang, "eat": _eat}


def install_fault(text: str, once: str) -> None:
    """Let a step of every runner in this process go wrong.

    Args:
        text: ``STEP:KIND``.
        once: A file that says that it has happened; empty = none.
    """
    step, _, kind = text.partition(":")
    execute: Callable[..., Any] = ModelRunner.execute
    num_steps = 0

    def execute_until_fault(self: ModelRunner, *args: Any) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps == int(step) and not (once and Path(once).exists()):
            if once:
                Path(once).touch()
            FAULTS[kind]()
        return execute(self, *args)

    ModelRunner.execute = execute_until_fault  # type: ignore[method-assign]


if __name__ == "__main__":
    install_fault(os.environ.pop("FAULT"), os.environ.pop("FAULT_ONCE", ""))
    sys.exit(main())
