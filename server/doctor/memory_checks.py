"""How the machine's memory stands: free, limited by a cgroup, swapped out, in huge pages. Reads /proc and /sys."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from engine_core import available_bytes, read_cgroup_memory
from server.doctor.findings import Finding, note, ok, warning
from server.doctor.units import format_size

_MIB = 2**20
_LOW_BYTES = 1024 * _MIB
# A few pages of sleeping programs in the swap are nobody's trouble.
_MUCH_SWAPPED_BYTES = 512 * _MIB
_STRICT_OVERCOMMIT = "2"


def check_memory(root: Path = Path("/")) -> Iterator[Finding]:
    """Yield what there is to say.

    Args:
        root: Where ``proc`` and ``sys`` are; for tests.
    """
    meminfo = _read_meminfo(root)
    yield _check_free(root, meminfo)
    yield from _check_swap(meminfo)
    if _read_text(root / "proc/sys/vm/overcommit_memory") == _STRICT_OVERCOMMIT:
        yield warning(
            "overcommit",
            "vm.overcommit_memory is 2: memory that is set aside counts as taken before anybody writes to it",
            "Name the KV cache's size with --kv-cache-bytes, or set vm.overcommit_memory to 0.",
        )
    yield from _check_huge_pages(root)


def _check_free(root: Path, meminfo: dict[str, int]) -> Finding:
    available, cgroup = available_bytes(root), read_cgroup_memory(root)
    says = f"{format_size(available)} free"
    if "MemTotal" in meminfo:
        says += f" of the machine's {format_size(meminfo['MemTotal'])}"
    if cgroup is not None and cgroup.left_bytes == available:
        says = (
            f"{format_size(available)} free of the {format_size(cgroup.limit_bytes)} that this container or service "
            "may take"
        )
    if available < _LOW_BYTES:
        return warning("memory", says, "Stop what takes it, or raise the limit: a small model needs about 1 GiB.")
    return ok("memory", says)


def _check_swap(meminfo: dict[str, int]) -> Iterator[Finding]:
    swapped = meminfo.get("SwapTotal", 0) - meminfo.get("SwapFree", 0)
    if swapped > _MUCH_SWAPPED_BYTES:
        yield warning(
            "swap",
            f"{format_size(swapped)} of memory are swapped out",
            "Free memory or use a smaller model: weights that are swapped out are read from disk for every token.",
        )


def _check_huge_pages(root: Path) -> Iterator[Finding]:
    text = _read_text(root / "sys/kernel/mm/transparent_hugepage/enabled")
    chosen = re.search(r"\[(\w+)\]", text)
    if chosen is None:
        return
    if chosen[1] == "never":
        yield warning(
            "huge pages",
            "transparent huge pages are off, so reading the weights costs more look-ups of addresses",
            "Write madvise to /sys/kernel/mm/transparent_hugepage/enabled; pages of weights and KV cache ask for it.",
        )
    else:
        yield ok("huge pages", f"transparent huge pages: {chosen[1]}")


def check_address_space(limits: dict[str, int | None]) -> Iterator[Finding]:
    """Yield a finding where the shell's limits bound memory that is merely set aside.

    Args:
        limits: Soft limits in bytes by the letter that ``ulimit`` calls them; None = none.
    """
    for letter, what in (("v", "address space"), ("d", "data")):
        limit = limits.get(letter)
        if limit is not None:
            yield warning(
                "ulimit",
                f"ulimit -{letter} holds the {what} to {format_size(limit)}",
                f"Lift it with ulimit -{letter} unlimited: libraries and KV cache set more aside than they write to.",
            )


def check_clock_source(root: Path = Path("/")) -> Iterator[Finding]:
    """Yield a finding where reading the time is slow; it is read several times a token."""
    source = _read_text(root / "sys/devices/system/clocksource/clocksource0/current_clocksource")
    if source in ("hpet", "acpi_pm", "jiffies", "refined-jiffies"):
        yield note(
            "clock source",
            f"{source}: reading the time is a system call of a microsecond or more, several times a token",
            "Nothing is wrong; a kernel that trusts the CPU's own counter (tsc) is quicker.",
        )


def _read_meminfo(root: Path) -> dict[str, int]:
    found = re.findall(r"^(\w+):\s+(\d+) kB$", _read_text(root / "proc/meminfo"), re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in found}


def _read_text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
