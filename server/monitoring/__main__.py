"""Writes the dashboard, the alerts and their configuration: ``python -m server.monitoring deploy/``."""

from __future__ import annotations

import argparse
from pathlib import Path

from server.monitoring.files import build_files


def main(arguments: list[str] | None = None) -> None:
    """Write the files.

    Args:
        arguments: Of the command line; None = the process's own.
    """
    parser = argparse.ArgumentParser(prog="python -m server.monitoring", description=__doc__)
    parser.add_argument("directory", type=Path, metavar="DIR", help="Where to: deploy/ of this project.")
    directory: Path = parser.parse_args(arguments).directory
    for name, text in build_files().items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
