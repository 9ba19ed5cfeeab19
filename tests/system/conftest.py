"""Everything in this folder is a system test: `make test-system` runs it, `make test` does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.config import default_cache_dir
from server.model_resolver import fetch_embedded_model

_HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark them, before -m picks by the mark."""
    for item in items:
        if item.path.is_relative_to(_HERE):
            item.add_marker(pytest.mark.system)


@pytest.fixture(scope="session")
def embedded_model() -> Path:
    """The embedded model's GGUF, from the user's cache; fetched where it is not there yet."""
    return fetch_embedded_model(default_cache_dir(), progress=print)


@pytest.fixture(scope="session", autouse=True)
def _fetched(embedded_model: Path) -> None:
    """No server of these tests is kept waiting by a download."""
