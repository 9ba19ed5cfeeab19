"""The server under load: its address, and requests to it as bytes."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

_DEFAULT_PORT = 80


class BenchError(Exception):
    """The load cannot be run at all. The message is a sentence for the operator."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go.

    Attributes:
        host: Name or address, without brackets.
        port: TCP.
        prefix: Path before ``/v1``, without a closing slash; mostly empty.
        api_key: Sent as a bearer token; None = no such header.
    """

    host: str
    port: int
    prefix: str = ""
    api_key: str | None = None

    @property
    def url(self) -> str:
        """For messages, without ``/v1``."""
        return f"http://{self._authority}{self.prefix}"

    @property
    def _authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"

    def build_get(self, path: str) -> bytes:
        """Return a GET request; ``path`` begins with /v1."""
        return self._build_head("GET", path, ()) + b"\r\n"

    def build_post(self, path: str, body: dict[str, Any]) -> bytes:
        """Return a POST request of a JSON body; ``path`` begins with /v1."""
        data = json.dumps(body, ensure_ascii=False).encode()
        headers = ("Content-Type: application/json", f"Content-Length: {len(data)}")
        return self._build_head("POST", path, headers) + b"\r\n" + data

    def _build_head(self, method: str, path: str, headers: tuple[str, ...]) -> bytes:
        key = (f"Authorization: Bearer {self.api_key}",) if self.api_key else ()
        lines = (f"{method} {self.prefix}{path} HTTP/1.1", f"Host: {self._authority}", "Connection: close")
        return "".join(f"{line}\r\n" for line in (*lines, *key, *headers)).encode()


def parse_target(url: str, api_key: str | None = None) -> Target:
    """Read a base URL, with or without its closing ``/v1``.

    Raises:
        BenchError: It is no http:// address.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError as error:
        raise BenchError(
            f"The base URL {url!r} does not parse ({error}); give one like http://127.0.0.1:8000."
        ) from None
    if parts.scheme == "https":
        raise BenchError(f"{url} is https, which costs the client too much to measure: give the server's http address.")
    if parts.scheme != "http" or not host:
        raise BenchError(f"The base URL {url!r} must begin with http://, as http://127.0.0.1:8000 does.")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise BenchError("The API key holds characters that a header cannot; check --api-key.")
    prefix = parts.path.rstrip("/").removesuffix("/v1")
    return Target(host, port or _DEFAULT_PORT, prefix, api_key)
