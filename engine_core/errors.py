"""What can go wrong in the engine, outside a single request.

EngineError
├── ConfigError        a setting, or two together, make no sense: names them and their values
├── CheckpointError    the model's files: missing, misshapen, unknown architecture, refused format
├── CapacityError      the machine's memory does not hold what was asked
└── EngineDeadError    a step failed; nothing more will run
"""

from __future__ import annotations


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
