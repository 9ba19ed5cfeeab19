"""The file of --api-keys-file: one key a line. Reads it and says what is wrong with it; never shows a key."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from engine_core import ConfigError
from server.access.api_keys import ApiKey, parse_api_key

logger = logging.getLogger(__name__)

_MAX_BYTES = 4 * 1024 * 1024


def read_key_file(path: Path) -> tuple[ApiKey, ...]:
    """Read the keys of a file. Empty lines, and those that begin with #, mean nothing.

    A file that everybody may write is refused. One that everybody may read is not, though it is warned of where it
    holds keys rather than digests: the secrets that Kubernetes and Compose mount are such files, where nobody else is.

    Raises:
        ConfigError: It cannot be read, holds no key, or holds a line that is none.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"--api-keys-file {path} cannot be read: {error.strerror}") from None
    if len(raw) > _MAX_BYTES:
        raise ConfigError(f"--api-keys-file {path} is larger than {_MAX_BYTES} bytes; is it the right file?")
    if stat.S_ISREG(mode) and mode & stat.S_IWOTH:
        raise ConfigError(f"--api-keys-file {path} can be written by everybody; run chmod o-w on it")
    keys = _parse(path, raw)
    if mode & stat.S_IROTH and any(key.num_chars for key in keys):
        logger.warning(
            "%s holds keys, and everybody on this machine may read it: run chmod 600 on it, or keep digests in it "
            "(`pointsman keygen` writes such lines).",
            path,
        )
    return keys


def _parse(path: Path, raw: bytes) -> tuple[ApiKey, ...]:
    keys = []
    for number, line in enumerate(raw.decode("utf-8", "replace").splitlines(), start=1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        try:
            keys.append(parse_api_key(text))
        except ValueError as error:
            raise ConfigError(f"--api-keys-file {path}: line {number} {error}") from None
    if not keys:
        raise ConfigError(f"--api-keys-file {path} holds no key, so nobody could use the server; put one into it")
    return tuple(keys)
