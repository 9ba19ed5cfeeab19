"""`python -m tests.e2e.slowed_server serve ...`: Pointsman whose steps take as long as a test says.

SLOWED_STEP_S: seconds that each step takes longer. SLOWED_STUCK_FILE: once it is there, the next step does not come to
an end, inside native code like a kernel that hangs. SLOWED_LOOP_FILE: once it is there, the event loop stands still as
soon as it hears of a step.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

from engine_core import EngineCoreOutputs
from engine_core.model.runner import ModelRunner
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from server.__main__ import main
from server.in_proc_client import InProcEngineClient

_FOR_EVER_S = 3600
_STEP_S = float(os.environ.get("SLOWED_STEP_S", "0"))
_STUCK_FILE = Path(os.environ.get("SLOWED_STUCK_FILE", "/no/such/file"))
_LOOP_FILE = Path(os.environ.get("SLOWED_LOOP_FILE", "/no/such/file"))


def slow_down() -> None:
    """Put the waits in the way of every step."""
    execute, take_outputs, libc = ModelRunner.execute, InProcEngineClient._take_outputs, ctypes.CDLL(None)

    def execute_slowly(self: ModelRunner, output: SchedulerOutput) -> ModelRunnerOutput:
        if _STUCK_FILE.exists():
            libc.sleep(_FOR_EVER_S)
        time.sleep(_STEP_S)
        return execute(self, output)

    def take_slowly(self: InProcEngineClient, outputs: EngineCoreOutputs) -> None:
        if _LOOP_FILE.exists():
            time.sleep(_FOR_EVER_S)
        take_outputs(self, outputs)

    ModelRunner.execute = execute_slowly  # type: ignore[method-assign]
    InProcEngineClient._take_outputs = take_slowly  # type: ignore[method-assign]


if __name__ == "__main__":
    slow_down()
    sys.exit(main())
