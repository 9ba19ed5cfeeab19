"""What can go wrong in the engine, outside a single request.

EngineError
├── ConfigError        a setting, or two together, make no sense: names them and their values
├── CheckpointError    the model's files: missing, misshapen, unknown architecture, refused format
├── CapacityError      the machine's memory does not hold what was asked
└── EngineDeadError    a step failed; nothing more will run
"""

from __future__ import annotations

import enum


class EngineError(Exception):
    """Base of the engine's own errors. The message is a sentence for the operator."""


class ConfigError(EngineError):
    """A configuration that cannot work."""


class CheckpointError(EngineError):
    """A model that cannot be loaded."""


class CapacityError(EngineError):
    """Not enough memory for weights or KV blocks."""


class EngineDeadError(EngineError):
    """The engine has stopped and will not answer."""


class EngineFailure(enum.StrEnum):
    """What an engine died of, as far as whoever starts it again should care."""

    CONFIG = "config"  # the same settings will fail again
    CHECKPOINT = "checkpoint"  # so will the same files
    MEMORY = "memory"  # the same may work when others leave more
    FAULT = "fault"  # anything else


# How torch, the kernels and the system say it; none of them has a class of error of its own on every device.
_MEMORY_WORDS = ("not enough memory", "allocate memory", "out of memory")


def classify_failure(error: BaseException) -> EngineFailure:
    """Return what kind of failure ended the engine."""
    match error:
        case ConfigError():
            return EngineFailure.CONFIG
        case CheckpointError():
            return EngineFailure.CHECKPOINT
        case CapacityError() | MemoryError():
            return EngineFailure.MEMORY
        case RuntimeError() | OSError() if any(words in str(error).lower() for words in _MEMORY_WORDS):
            return EngineFailure.MEMORY
    return EngineFailure.FAULT


def describe_failure(error: BaseException) -> str:
    """Return what ended the engine, as a sentence or its own words where nobody knows better."""
    text = str(error).strip()
    first = text.partition("\n")[0]
    is_cuda = "CUDA" in first  # as torch begins; "cuda" is in the paths of whatever else goes wrong
    if is_cuda and classify_failure(error) is EngineFailure.MEMORY:
        return (
            f"the card's memory is exhausted: lower --gpu-memory-utilization, --max-num-batched-tokens or "
            f"--max-num-seqs, or stop what else is on the card ({first})"
        )
    if is_cuda and isinstance(error, RuntimeError):
        return f"the card failed, and nothing more can run on it before a new start: {first}"
    return f"{type(error).__name__}: {text}"
