"""Reads a dashboard as Grafana's own types have it. Run by an interpreter that has grafana-foundation-sdk.

    python grafana_check.py DASHBOARD.json

Prints, as JSON, what these types lost of it and how many panels and queries they found.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard


def find_lost(given: Any, kept: Any, path: str = "") -> Iterator[str]:
    """Yield the places at which ``kept`` is not what was given."""
    if isinstance(given, dict) and isinstance(kept, dict):
        for key, value in given.items():
            if key not in kept and value not in ([], {}, None, False):
                yield f"{path}.{key}"
            elif key in kept:
                yield from find_lost(value, kept[key], f"{path}.{key}")
    elif isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        for number, (one, other) in enumerate(zip(given, kept, strict=True)):
            yield from find_lost(one, other, f"{path}[{number}]")
    elif given != kept:
        yield f"{path}: {given!r} became {kept!r}"


def main(path: str) -> None:
    """Print the findings."""
    register_default_plugins()
    given = json.loads(Path(path).read_text(encoding="utf-8"))
    kept = json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(given)))
    panels = [panel for each in kept["panels"] for panel in (each, *each.get("panels", []))]
    queries = [target for panel in panels for target in panel.get("targets", [])]
    print(json.dumps({"lost": list(find_lost(given, kept)), "panels": len(panels), "queries": len(queries)}))


if __name__ == "__main__":
    main(sys.argv[1])
