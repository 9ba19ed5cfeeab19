"""How many threads this process can keep busy: its affinity, and the CPU time that its cgroup grants it."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from kernels.cgroup import cgroup_folders


@dataclass(frozen=True, slots=True)
class ThreadLimits:
    """What bounds the threads.

    Attributes:
        num_online: Cores of the machine.
        num_allowed: Of those, the ones that this process may run on.
        quota: Cores whose time its cgroup grants; None = no limit.
    """

    num_online: int
    num_allowed: int
    quota: float | None

    @property
    def num_threads(self) -> int:
        """How many can be kept busy, at least 1.

        A quota of 1.5 cores counts as 1: threads that use it up before its period ends all stand still until then.
        """
        return max(1, self.num_allowed if self.quota is None else min(self.num_allowed, int(self.quota)))


def read_thread_limits(root: Path = Path("/"), num_cores: int | None = None) -> ThreadLimits:
    """Return what bounds this process's threads.

    Args:
        root: Where ``proc`` and ``sys`` are; for tests.
        num_cores: Of the affinity mask; None = this process's.
    """
    num_allowed = _affinity() if num_cores is None else num_cores
    quotas = [quota for folder in cgroup_folders(root, "cpu") if (quota := _quota(folder)) is not None]
    return ThreadLimits(os.cpu_count() or num_allowed, num_allowed, min(quotas, default=None))


def usable_threads(root: Path = Path("/"), num_cores: int | None = None) -> int:
    """Return the cores this process may run on, or fewer where a cgroup's quota is less; see read_thread_limits()."""
    return read_thread_limits(root, num_cores).num_threads


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _quota(folder: Path) -> float | None:
    """Return the cores that a cgroup grants; None = no limit."""
    try:
        if (folder / "cpu.max").exists():
            quota, period = (folder / "cpu.max").read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        cores = float(quota) / float(period)
    except (OSError, ValueError, ZeroDivisionError):  # "max" is no number
        return None
    return cores if cores > 0 else None  # version 1 says -1
