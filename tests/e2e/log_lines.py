"""The log of a real server, read as a program reads it."""

from __future__ import annotations

import json
from typing import Any

from tests.e2e.server_process import ServerProcess


def read_lines(server: ServerProcess) -> list[dict[str, Any]]:
    """Every line of the log so far; each must be JSON. The curl on standard output, for people, is left out."""
    return [json.loads(line) for line in list(server.lines) if not line.startswith("curl ")]


def read_request_lines(server: ServerProcess) -> list[dict[str, Any]]:
    """Those that tell of a request's end."""
    return [line for line in read_lines(server) if line["logger"] == "server.requests"]


def wait_for_request_line(server: ServerProcess, label: str) -> dict[str, Any]:
    """The line of the request with this X-Request-Id; there must be one only."""

    def find() -> list[dict[str, Any]]:
        return [line for line in read_request_lines(server) if line["x_request_id"] == label]

    server.wait_until(find, 30)
    (line,) = find()
    return line
