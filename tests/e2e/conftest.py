"""Fixtures for the end-to-end tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.config import default_cache_dir
from server.model_resolver import fetch_embedded_model


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """The embedded model's GGUF, from the user's cache; fetched where it is not there yet."""
    return fetch_embedded_model(default_cache_dir(), progress=print)
