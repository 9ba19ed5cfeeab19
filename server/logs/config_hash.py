"""A short name for a configuration, for the log's first line: servers with the same one were told the same. Pure."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping

from server.config import ServerConfig
from server.logs.log_event import LogEvent

# Not even as a part of a digest: who knows all the rest could try out what fits.
_SECRETS = ("api_key", "ssl_")


def compute_config_hash(config: ServerConfig) -> str:
    """Return 12 hexadecimal digits, equal for equal settings, keys and certificates aside."""
    fields = [field.name for field in dataclasses.fields(config) if not field.name.startswith(_SECRETS)]
    told = {name: str(getattr(config, name)) for name in sorted(fields)}
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]


class ServerStart(LogEvent):
    """The start of a server.

    Args:
        version: Of Pointsman.
        config_hash: Names its configuration.
    """

    def __init__(self, version: str, config_hash: str) -> None:
        self._version = version
        self._config_hash = config_hash

    @property
    def title(self) -> str:
        """One sentence."""
        return f"Pointsman {self._version} starts, configuration {self._config_hash}"

    @property
    def fields(self) -> Mapping[str, object]:
        """The same by name."""
        return {"version": self._version, "config_hash": self._config_hash}
