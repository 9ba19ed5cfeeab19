from __future__ import annotations

import pytest

from engine_core.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineDeadError,
    EngineFailure,
    classify_failure,
)


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (ConfigError("x"), EngineFailure.CONFIG),
        (CheckpointError("x"), EngineFailure.CHECKPOINT),
        (CapacityError("x"), EngineFailure.MEMORY),
        (MemoryError(), EngineFailure.MEMORY),
        # torch on a CPU, torch on a GPU, our kernels, mmap.
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate"), EngineFailure.MEMORY),
        (RuntimeError("CUDA out of memory. Tried to allocate"), EngineFailure.MEMORY),
        (RuntimeError("There is not enough memory."), EngineFailure.MEMORY),
        (OSError(12, "Cannot allocate memory"), EngineFailure.MEMORY),
        (RuntimeError("device lost"), EngineFailure.FAULT),
        (EngineDeadError("x"), EngineFailure.FAULT),
        (KeyError("not enough memory"), EngineFailure.FAULT),
    ],
)
def test_what_an_engine_died_of_is_known_by_its_error(error: BaseException, failure: EngineFailure) -> None:
    assert classify_failure(error) is failure
