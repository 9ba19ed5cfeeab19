"""What bounds this process: open files, the port, the clock, the versions that it runs on. Changes nothing."""

from __future__ import annotations

import platform
import resource
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib import metadata

from server.config import ServerConfig
from server.doctor.findings import Finding, error, note, ok, warning
from server.doctor.memory_checks import check_address_space, check_clock_source
from server.http.listener import ListenError, bind

# A connection each, and some 60 of the process's own.
_FEW_FILES = 1024
_MIN_TORCH = (2, 11)
# Nothing of this was written before.
_BORN = datetime(2026, 1, 1, tzinfo=UTC).timestamp()


def check_process(config: ServerConfig, *, uses_card: bool = False) -> Iterator[Finding]:
    """Yield what there is to say of the process that serve would be.

    Args:
        config: The server's.
        uses_card: A card computes.
    """
    yield check_open_files(resource.getrlimit(resource.RLIMIT_NOFILE))
    yield from check_address_space({letter: _soft_limit(number) for letter, number in _ULIMITS.items()})
    yield check_port(config.host, config.port)
    yield from check_clock(time.time())
    yield from check_clock_source()
    yield check_versions(sys.version_info[:3], _torch_version(), uses_card=uses_card)


def check_open_files(limits: tuple[int, int]) -> Finding:
    """Return what the limit on open files means for connections.

    Args:
        limits: Soft and hard.
    """
    soft, hard = limits
    if soft == resource.RLIM_INFINITY or soft > _FEW_FILES:
        return ok("open files", "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,} at most")
    says = f"{soft:,} at most, and each connection is one"
    up_to = "unlimited" if hard == resource.RLIM_INFINITY else str(hard)
    todo = f"Raise it before the start: ulimit -n {min(65536, hard) if hard > 0 else up_to}, or LimitNOFILE= in a unit."
    return note("open files", says, todo) if soft == _FEW_FILES else warning("open files", says, todo)


def check_port(host: str, port: int) -> Finding:
    """Return whether the address can be listened on: by trying."""
    if port == 0:
        return ok("port", "any free one")
    try:
        bind(host, port).close()
    except ListenError as failure:
        says, _, todo = str(failure).rstrip(".").partition("; ")
        return error("port", says, f"{todo[:1].upper()}{todo[1:] or 'Choose another --host or --port'}.")
    return ok("port", f"{host}, port {port} is free")


def check_clock(now: float) -> Iterator[Finding]:
    """Yield a finding where the clock is plainly wrong.

    Args:
        now: Seconds since 1970, as the machine believes.
    """
    if now < _BORN:
        yield warning(
            "clock",
            f"it says {datetime.fromtimestamp(now, UTC):%Y-%m-%d}, which is before this program was written",
            "Set it: certificates look invalid to a wrong clock, and answers and logs carry its time.",
        )


def check_versions(python: tuple[int, ...], torch: str, *, uses_card: bool = False) -> Finding:
    """Return what this runs on.

    Args:
        python: Version.
        torch: Version; empty where it is not installed.
        uses_card: A card computes.
    """
    says = f"Python {'.'.join(map(str, python))}, {platform.system()} {platform.release()}"
    if not torch:
        return error("versions", f"{says}, without torch", "Install it: pip install torch, the CPU build.")
    says += f", torch {torch}"
    if _leading_numbers(torch) < _MIN_TORCH:
        return error("versions", says, f"Install torch {'.'.join(map(str, _MIN_TORCH))} or newer.")
    if ("+cu" in torch or "+rocm" in torch) and not uses_card:
        todo = "It works; the CPU build does the same without a card and is 2 GB smaller."
        return note("versions", f"{says}, a build for GPUs, and none computes here", todo)
    return ok("versions", says)


def _leading_numbers(version: str) -> tuple[int, ...]:
    numbers = []
    for part in version.split("+")[0].split(".")[:2]:
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def _torch_version() -> str:
    # Not imported for it: that takes a second, and may be what is broken.
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""


_ULIMITS = {"v": resource.RLIMIT_AS, "d": resource.RLIMIT_DATA}


def _soft_limit(number: int) -> int | None:
    soft, _ = resource.getrlimit(number)
    return None if soft == resource.RLIM_INFINITY else soft
