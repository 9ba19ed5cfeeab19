"""Every POINTSMAN_ variable that a file under deploy/ or the Dockerfile sets is a flag's."""

from __future__ import annotations

import re
from pathlib import Path

from server.config import field_names

ROOT = Path(__file__).parent.parent.parent
# Variables of compose itself, for its own ${...}: which image, not how it serves.
COMPOSE_OWN = {"IMAGE"}


def test_every_variable_is_a_flags() -> None:
    files = [ROOT / "Dockerfile", *sorted(path for path in (ROOT / "deploy").rglob("*") if path.is_file())]
    unknown = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in files
        for name in re.findall(r"\bPOINTSMAN_([A-Z][A-Z0-9_]*)", path.read_text(errors="replace"))
        if name not in COMPOSE_OWN and name.lower() not in field_names()
    }
    assert unknown == set()
