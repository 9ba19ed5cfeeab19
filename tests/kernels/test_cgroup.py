"""The cgroups around this process, of both versions, from the inside out."""

from __future__ import annotations

from pathlib import Path

from kernels.cgroup import cgroup_folders


def write_cgroups(root: Path, text: str) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(text)
    return root


def test_the_own_cgroup_comes_before_those_above_it(tmp_path: Path) -> None:
    root = write_cgroups(tmp_path, "0::/outer/inner\n")
    mount = root / "sys/fs/cgroup"
    unified = [mount / "outer/inner", mount / "outer", mount]
    assert list(cgroup_folders(root, "memory")) == [*unified, mount / "memory"]


def test_version_1_has_a_path_for_each_controller(tmp_path: Path) -> None:
    root = write_cgroups(tmp_path, "4:cpu,cpuacct:/docker/1\n3:memory:/docker/2\n1:name=systemd:/elsewhere\n")
    mount = root / "sys/fs/cgroup"
    assert list(cgroup_folders(root, "cpu")) == [mount, mount / "cpu/docker/1", mount / "cpu/docker", mount / "cpu"]
    assert mount / "memory/docker/2" in list(cgroup_folders(root, "memory"))


def test_without_a_proc_the_mounts_are_all(tmp_path: Path) -> None:
    mount = tmp_path / "sys/fs/cgroup"
    assert list(cgroup_folders(tmp_path, "memory")) == [mount, mount / "memory"]
