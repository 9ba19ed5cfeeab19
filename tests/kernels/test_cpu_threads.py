from __future__ import annotations

from pathlib import Path

import pytest

from kernels.cpu_threads import read_thread_limits, usable_threads


def write(root: Path, **files: str) -> Path:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_DOT_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("quota", "threads"),
    [("max 100000", 8), ("200000 100000", 2), ("350000 100000", 3), ("150000 100000", 1), ("50000 100000", 1), ("", 8)],
)
def test_version_2_quotas(tmp_path: Path, quota: str, threads: int) -> None:
    root = write(tmp_path, sys__fs__cgroup__cpu_DOT_max=quota)
    assert usable_threads(root, 8) == threads


def test_a_quota_above_the_cores_adds_none(tmp_path: Path) -> None:
    assert usable_threads(write(tmp_path, sys__fs__cgroup__cpu_DOT_max="900000 100000"), 4) == 4


def test_the_tightest_cgroup_on_the_way_up_counts(tmp_path: Path) -> None:
    root = write(
        tmp_path,
        proc__self__cgroup="0::/outer/inner\n",
        sys__fs__cgroup__outer__cpu_DOT_max="300000 100000",
        sys__fs__cgroup__outer__inner__cpu_DOT_max="max 100000",
    )
    assert usable_threads(root, 8) == 3


@pytest.mark.parametrize(("quota", "threads"), [("-1", 8), ("250000", 2)])
def test_version_1_quotas(tmp_path: Path, quota: str, threads: int) -> None:
    folder = tmp_path / "sys/fs/cgroup/cpu/docker/1234"
    folder.mkdir(parents=True)
    (folder / "cpu.cfs_quota_us").write_text(quota)
    (folder / "cpu.cfs_period_us").write_text("100000")
    root = write(tmp_path, proc__self__cgroup="4:cpu,cpuacct:/docker/1234\n3:memory:/elsewhere\n")
    assert usable_threads(root, 8) == threads


def test_without_cgroups_the_affinity_counts(tmp_path: Path) -> None:
    assert usable_threads(tmp_path, 3) == 3
    assert usable_threads() >= 1


def test_the_limits_are_told_one_by_one(tmp_path: Path) -> None:
    limits = read_thread_limits(write(tmp_path, sys__fs__cgroup__cpu_DOT_max="150000 100000"), 3)
    assert (limits.num_allowed, limits.quota, limits.num_threads) == (3, 1.5, 1)
    assert limits.num_online >= 1
    assert read_thread_limits(tmp_path / "empty", 3).quota is None
