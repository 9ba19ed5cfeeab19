"""How many threads this process can keep busy: its affinity, and the CPU time that its cgroup grants it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def usable_threads(root: Path = Path("/"), num_cores: int | None = None) -> int:
    """Return the cores this process may run on, or fewer where a cgroup's quota is less. At least 1.

    A quota of 1.5 cores counts as 1: threads that use it up before its period ends all stand still until then.

    Args:
        root: Where ``proc`` and ``sys`` are; for tests.
        num_cores: Of the affinity mask; None = this process's.
    """
    cores = _affinity() if num_cores is None else num_cores
    quotas = [quota for folder in _cgroup_folders(root) if (quota := _quota(folder)) is not None]
    return max(1, min([cores, *(int(quota) for quota in quotas)]))


def _affinity() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cgroup_folders(root: Path) -> Iterator[Path]:
    """Yield this process's cgroup and all above it, of version 2 and of version 1's cpu controller."""
    mounts = {"": root / "sys/fs/cgroup", "cpu": root / "sys/fs/cgroup/cpu"}
    paths = dict.fromkeys(mounts, "/")
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    for line in lines:  # 0::/user.slice or 4:cpu,cpuacct:/docker/...
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for name in mounts:
            if name in controllers.split(","):
                paths[name] = path
    for name, mount in mounts.items():
        folder = mount / paths[name].strip("/")
        # In a container the path is often the host's, and only the mount itself is there.
        yield from (parent for parent in (folder, *folder.parents) if parent.is_relative_to(mount))


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
