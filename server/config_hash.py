"""A short name for a configuration: two servers with the same one were told the same. Pure; tells no secret."""

from __future__ import annotations

import dataclasses
import hashlib
import json

from server.config import ServerConfig

# Not even as a part of a digest: who knows all the rest could try out what fits.
_SECRETS = ("api_key", "ssl_")


def compute_config_hash(config: ServerConfig) -> str:
    """Return 12 hexadecimal digits, equal for equal settings, keys and certificates aside."""
    fields = [field.name for field in dataclasses.fields(config) if not field.name.startswith(_SECRETS)]
    told = {name: str(getattr(config, name)) for name in sorted(fields)}
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:12]
