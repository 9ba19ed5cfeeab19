"""Where this user's files that can be made again are kept: models, built kernels. Imports nothing, knows no flag."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def default_cache_dir(environment: Mapping[str, str] | None = None) -> Path:
    """Return the user's cache directory: POINTSMAN_CACHE_DIR, or else ``pointsman`` in XDG's.

    Args:
        environment: As os.environ, which it is where None.

    Raises:
        RuntimeError: Neither is set, and the user has no home; what to do, as the end of a sentence.
    """
    environment = os.environ if environment is None else environment
    if environment.get("POINTSMAN_CACHE_DIR"):
        return Path(environment["POINTSMAN_CACHE_DIR"]).expanduser()
    try:
        return Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pointsman"
    except RuntimeError as error:
        raise RuntimeError("this user has no home directory: name a folder in POINTSMAN_CACHE_DIR") from error
