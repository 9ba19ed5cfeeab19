"""Numbers as an operator reads them."""

from __future__ import annotations

_STEPS = ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def format_size(num_bytes: int) -> str:
    """Return bytes with three digits or so: ``93 MiB``, ``1.46 GiB``."""
    for size, unit in _STEPS:
        if num_bytes >= size:
            value = num_bytes / size
            return f"{value:.2f} {unit}" if value < 10 else f"{value:,.0f} {unit}"
    return f"{num_bytes} bytes"


def format_count(count: int, what: str) -> str:
    """Return a count with its noun: ``1 thread``, ``8 threads``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"
