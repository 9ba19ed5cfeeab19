"""The real FlashInfer, for tests: it imports without a GPU, and writes its log where it does not matter."""

from __future__ import annotations

import importlib
import os
import tempfile
from types import ModuleType


def import_flashinfer() -> ModuleType:
    """Import it. Takes some 4 s once; installed by requirements-flashinfer.lock."""
    os.environ.setdefault("FLASHINFER_WORKSPACE_BASE", tempfile.mkdtemp(prefix="flashinfer-"))
    return importlib.import_module("flashinfer")
