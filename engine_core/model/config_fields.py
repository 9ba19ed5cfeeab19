"""Typed reads of a checkpoint's JSON. Every error names the file and the key; knows no architecture."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engine_core.errors import CheckpointError

# Far above any model's. The tables that are built a layer, before a tensor is looked for, stay small.
_MAX_LAYERS = 10_000


class ConfigFields:
    """A JSON object whose keys are read with their type checked. null counts as absent.

    Args:
        raw: The object.
        origin: What to call it in messages, such as ``config.json``.
    """

    def __init__(self, raw: Mapping[str, Any], origin: str) -> None:
        self.raw = raw
        self.origin = origin

    def with_defaults(self, defaults: Mapping[str, Any]) -> ConfigFields:
        """Return fields that fall back on ``defaults`` where a key is absent. An explicit null stays null."""
        return ConfigFields({**defaults, **self.raw}, self.origin)

    def section(self, key: str) -> ConfigFields | None:
        """Return a nested object, or None where it is absent.

        Raises:
            CheckpointError: The value is no object.
        """
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(key, "an object")
        return ConfigFields(value, f"{self.origin} {key}")

    def count(self, key: str) -> int:
        """Return a whole number above 0.

        Raises:
            CheckpointError: It is absent or something else.
        """
        value = self.optional_int(key)
        if value is None:
            raise self._missing(key)
        if value < 1:
            raise self.error(key, "a whole number above 0")
        return value

    def num_layers(self, key: str) -> int:
        """Return a number of layers.

        Raises:
            CheckpointError: It is absent, or more than any model has.
        """
        value = self.count(key)
        if value > _MAX_LAYERS:
            raise self.error(key, f"at most {_MAX_LAYERS}")
        return value

    def optional_int(self, key: str) -> int | None:
        """Return a whole number, or None where it is absent.

        Raises:
            CheckpointError: It is something else.
        """
        value = self.raw.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(key, "a whole number")
        return value

    def number(self, key: str) -> float:
        """Return a finite number.

        Raises:
            CheckpointError: It is absent or something else.
        """
        value = self.optional_number(key)
        if value is None:
            raise self._missing(key)
        return value

    def positive(self, key: str) -> float:
        """Return a number above 0.

        Raises:
            CheckpointError: It is absent or something else.
        """
        value = self.number(key)
        if value <= 0.0:
            raise self.error(key, "above 0")
        return value

    def optional_number(self, key: str) -> float | None:
        """Return a finite number, or None where it is absent.

        Raises:
            CheckpointError: It is something else.
        """
        value = self.raw.get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise self.error(key, "a number")
        return float(value)

    def flag(self, key: str) -> bool:
        """Return true or false; false where it is absent.

        Raises:
            CheckpointError: It is something else.
        """
        value = self.raw.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise self.error(key, "true or false")
        return value

    def text(self, key: str) -> str:
        """Return a string.

        Raises:
            CheckpointError: It is absent or something else.
        """
        value = self.raw.get(key)
        if value is None:
            raise self._missing(key)
        if not isinstance(value, str):
            raise self.error(key, "a string")
        return value

    def texts(self, key: str) -> list[str] | None:
        """Return a list of strings, or None where it is absent.

        Raises:
            CheckpointError: It is something else.
        """
        value = self.raw.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.error(key, "a list of strings")
        return value

    def error(self, key: str, wanted: str) -> CheckpointError:
        """Return the error for a key whose value is not ``wanted``."""
        return CheckpointError(f"{self.origin}: {key} is {self.raw.get(key)!r}; it must be {wanted}.")

    def _missing(self, key: str) -> CheckpointError:
        return CheckpointError(f"{self.origin} does not say {key}, which this architecture needs.")
