from __future__ import annotations

import pytest

from engine_core.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    EngineDeadError,
    EngineFailure,
    classify_failure,
    describe_failure,
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


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee"),
            "the card's memory is exhausted: lower --gpu-memory-utilization, --max-num-batched-tokens or "
            "--max-num-seqs, or stop what else is on the card (CUDA out of memory. Tried to allocate 2.00 GiB.)",
        ),
        (
            RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be"),
            "the card failed, and nothing more can run on it before a new start: CUDA error: an illegal memory access "
            "was encountered",
        ),
        (RuntimeError("device lost\nfor good"), "RuntimeError: device lost\nfor good"),
        (ValueError("no CUDA here"), "ValueError: no CUDA here"),
        (RuntimeError("no nvcc in /usr/local/cuda"), "RuntimeError: no nvcc in /usr/local/cuda"),
    ],
)
def test_what_a_card_says_becomes_a_sentence_and_the_rest_stays(error: Exception, told: str) -> None:
    assert describe_failure(error) == told
