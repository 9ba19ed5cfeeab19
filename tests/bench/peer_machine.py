"""Who used the processor while a load ran, and how much memory a process tree holds. Linux only: reads /proc."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

_PROC = Path("/proc")
_NOT_BUSY = (3, 4)  # idle and iowait, among the columns of /proc/stat
_NUM_COLUMNS = 8  # guests are counted in user time already


class CpuMeter:
    """Splits processor time between a server, this process and everybody else.

    Args:
        root_pid: The server, with all it has started.
    """

    def __init__(self, root_pid: int) -> None:
        self._root_pid = root_pid
        self._ticks_per_s = os.sysconf("SC_CLK_TCK")
        self._start_s = time.perf_counter()
        self._start = self._read_s()

    def read_cores(self) -> dict[str, float]:
        """Return what each has used since the start, in cores: server, client (this process) and foreign."""
        wall_s = max(time.perf_counter() - self._start_s, 1e-9)
        busy, server, client = ((now - then) / wall_s for now, then in zip(self._read_s(), self._start, strict=True))
        return {
            "server_cores": server,
            "client_cores": client,
            "foreign_cores": max(0.0, busy - server - client),
        }

    def _read_s(self) -> tuple[float, float, float]:
        columns = [int(value) for value in (_PROC / "stat").read_text().split("\n", 1)[0].split()[1 : _NUM_COLUMNS + 1]]
        busy = sum(columns) - sum(columns[column] for column in _NOT_BUSY)
        server = sum(_read_ticks(pid) for pid in find_tree(self._root_pid))
        own = os.times()
        return busy / self._ticks_per_s, server / self._ticks_per_s, own.user + own.system


def find_tree(root_pid: int) -> list[int]:
    """Return a process and all its descendants that are alive."""
    children: dict[int, list[int]] = {}
    for entry in _PROC.iterdir():
        if entry.name.isdigit() and (fields := _read_fields(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, to_visit = [], [root_pid]
    while to_visit:
        pid = to_visit.pop()
        found.append(pid)
        to_visit += children.get(pid, [])
    return found


def measure_memory_bytes(root_pid: int) -> int:
    """Return what a process tree holds in memory; a page that several share counts once, huge pages of a pool too."""
    return sum(_read_memory(pid) for pid in find_tree(root_pid))


def _read_memory(pid: int) -> int:
    total = 0
    with contextlib.suppress(OSError):
        for line in (_PROC / str(pid) / "smaps_rollup").read_text().splitlines():
            name, _, value = line.partition(":")
            if name in ("Pss", "Private_Hugetlb", "Shared_Hugetlb"):
                total += int(value.split()[0]) * 1024
    return total


def _read_ticks(pid: int) -> int:
    fields = _read_fields(pid)
    return int(fields[11]) + int(fields[12]) if fields else 0


def _read_fields(pid: int) -> list[str]:
    """Return /proc/PID/stat from the state on: a name may hold spaces and brackets."""
    with contextlib.suppress(OSError):
        return (_PROC / str(pid) / "stat").read_text().rpartition(") ")[2].split()
    return []
