"""Where the control groups lie that hold this process, whichever of their two versions counts. Reads none of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def cgroup_folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of all above it: version 2's, then version 1's of a controller.

    Args:
        root: Where ``proc`` and ``sys`` are; for tests.
        controller: Of version 1, such as cpu or memory.
    """
    mounts = {"": root / "sys/fs/cgroup", controller: root / "sys/fs/cgroup" / controller}
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
