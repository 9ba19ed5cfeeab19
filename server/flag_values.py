"""What the text of a flag or variable means. Pure: text in; a value, or a ValueError that says what it must be, out."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_DTYPES = {"auto": "auto", "bf16": "bf16", "bfloat16": "bf16", "fp32": "fp32", "float32": "fp32", "float": "fp32"}
_BYTE_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._\[\]:-]+|null", re.ASCII)
_HOST = re.compile(r"[a-z0-9._-]+|\[[0-9a-f:.]+\]", re.ASCII)
_SIZE = re.compile(r"(\d[\d_]*(?:\.\d+)?) ?([KMGT]?)(?:I?B)?", re.IGNORECASE)


def parse_dtype(text: str) -> str:
    """Return auto, bf16 or fp32; vLLM's spellings are taken too."""
    if text.lower() not in _DTYPES:
        raise ValueError(f"must be auto, bf16 or fp32, not {text!r}")
    return _DTYPES[text.lower()]


def parse_bytes(text: str) -> int:
    """Return bytes from ``4G``, ``1.5GiB``, ``512M`` or ``1_000_000``; units are powers of 1024."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"must be a size such as 4G, 512M or 1_000_000, not {text!r}")
    number, unit = match.groups()
    return int(float(number) * _BYTE_UNITS[unit.upper()])


def parse_bool(text: str) -> bool:
    """Return a truth value from an environment variable."""
    lowered = text.strip().lower()
    if lowered in ("1", "true", "yes", "on"):
        return True
    if lowered in ("0", "false", "no", "off"):
        return False
    raise ValueError(f"must be 1 or 0, not {text!r}")


def parse_bool_or_auto(text: str) -> bool | None:
    """Return a truth value from an environment variable, None for auto."""
    if text.strip().lower() == "auto":
        return None
    try:
        return parse_bool(text)
    except ValueError:
        raise ValueError(f"must be auto, 1 or 0, not {text!r}") from None


def parse_int(at_least: int, at_most: int | None = None) -> Callable[[str], int]:
    """Return a parser of whole numbers in a range."""
    bounds = f"at least {at_least}" if at_most is None else f"{at_least} to {at_most}"

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise ValueError(f"must be a whole number, {bounds}, not {text!r}") from None
        if value < at_least or (at_most is not None and value > at_most):
            raise ValueError(f"must be {bounds}, not {value}")
        return value

    return parse


def parse_share(text: str) -> float:
    """Return a number in [0, 1)."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"must be a number from 0 to below 1, not {text!r}") from None
    if not 0.0 <= value < 1.0:
        raise ValueError(f"must lie in [0, 1), not {text}")
    return value


def parse_positive_share(text: str) -> float:
    """Return a number in (0, 1]."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"must be a number above 0, at most 1, not {text!r}") from None
    if not 0.0 < value <= 1.0:
        raise ValueError(f"must lie in (0, 1], not {text}")
    return value


def parse_factor(text: str) -> float:
    """Return a number of at least 0, not infinite."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"must be a number of at least 0, not {text!r}") from None
    if not (value >= 0.0 and math.isfinite(value)):
        raise ValueError(f"must be a finite number of at least 0, not {text}")
    return value


def parse_seconds(text: str) -> float:
    """Return a time: a number above 0, not infinite."""
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"must be a number of seconds, not {text!r}") from None
    if not (value > 0.0 and math.isfinite(value)):
        raise ValueError(f"must be a finite number of seconds above 0, not {text}")
    return value


def parse_port(text: str) -> int:
    """Return a TCP port; 0 = any free one."""
    if "://" in text:
        raise ValueError(
            f"must be a port number, not {text!r} (Kubernetes sets this variable for a Service named pointsman: "
            "rename the Service, or set enableServiceLinks: false)"
        )
    return parse_int(0, 65535)(text)


def parse_otlp_endpoint(text: str) -> str:
    """Return the URL that traces are posted to; one without a path gets OTLP's own."""
    problem = f"must be the URL of an OTLP/HTTP collector, such as http://localhost:4318, not {text!r}"
    try:
        parts = urlsplit(text.strip())
    except ValueError:
        raise ValueError(problem) from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(problem)
    return text.strip() if parts.path.strip("/") else text.strip().rstrip("/") + "/v1/traces"


def parse_path(text: str) -> Path:
    """Return a path, ``~`` expanded."""
    return Path(text).expanduser()


def parse_origins(text: str) -> tuple[str, ...]:
    """Return the origins of web pages, such as ``https://chat.example.org``, or ``*``; commas or a JSON list."""
    origins = tuple(origin.rstrip("/").lower() for origin in _split(text))
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ValueError(
                f"must be an origin such as https://chat.example.org or http://localhost:3000, not {origin!r}"
            )
    return origins


def parse_hosts(text: str) -> tuple[str, ...]:
    """Return host names without ports, or ``*``; commas or a JSON list."""
    hosts = tuple(host.lower() for host in _split(text))
    for host in hosts:
        if host != "*" and not _HOST.fullmatch(host):
            raise ValueError(f"must be a host's name without a port, such as llm.example.org, not {host!r}")
    return hosts


def _split(text: str) -> list[str]:
    """Return the words between commas, or those of a JSON list, as vLLM writes it."""
    if text.lstrip().startswith("["):
        try:
            words = json.loads(text)
        except ValueError:
            words = []
    else:
        words = text.split(",")
    stripped = [word.strip() for word in words if isinstance(word, str) and word.strip()]
    if not stripped:
        raise ValueError(f"must be words with commas between them, or a JSON list of strings, not {text!r}")
    return stripped


def parse_text(text: str) -> str:
    """Return text that is not empty."""
    if not text.strip():
        raise ValueError("must not be empty")
    return text


def as_argparse_type(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return the same parser with errors whose words argparse shows."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:  # argparse hides a ValueError's own words
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert
