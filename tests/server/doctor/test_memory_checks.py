"""Memory, swap, huge pages and limits, from a /proc and /sys of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from server.doctor.findings import Finding, Level
from server.doctor.memory_checks import check_address_space, check_clock_source, check_memory

GIB_KIB = 2**20


def machine(root: Path, *, available: int = 8 * GIB_KIB, swapped: int = 0, **files: str) -> Path:
    swap = 4 * GIB_KIB
    write(
        root,
        "proc/meminfo",
        f"MemTotal:       {16 * GIB_KIB} kB\nMemAvailable:   {available} kB\n"
        f"SwapTotal:      {swap} kB\nSwapFree:       {swap - swapped} kB\n",
    )
    for name, text in files.items():
        write(root, name.replace("__", "/"), text)
    return root


def write(root: Path, name: str, text: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def look(root: Path) -> dict[str, Finding]:
    return {finding.topic: finding for finding in check_memory(root)}


def test_a_healthy_machine(tmp_path: Path) -> None:
    found = look(machine(tmp_path, sys__kernel__mm__transparent_hugepage__enabled="always [madvise] never\n"))
    assert {finding.level for finding in found.values()} == {Level.OK}
    assert found["memory"].says == "8.00 GiB free of the machine's 16 GiB"
    assert "madvise" in found["huge pages"].says


def test_little_memory(tmp_path: Path) -> None:
    assert look(machine(tmp_path, available=500 * 1024))["memory"].level is Level.WARNING


def test_the_limit_of_a_container_is_named_where_it_decides(tmp_path: Path) -> None:
    root = machine(tmp_path)
    write(root, "sys/fs/cgroup/memory.max", f"{4 * 2**30}\n")
    write(root, "sys/fs/cgroup/memory.current", f"{2**30}\n")
    assert look(root)["memory"].says == "3.00 GiB free of the 4.00 GiB that this container or service may take"


def test_what_was_swapped_out(tmp_path: Path) -> None:
    assert "swap" not in look(machine(tmp_path / "little", swapped=100 * 1024))
    found = look(machine(tmp_path / "much", swapped=2 * GIB_KIB))["swap"]
    assert found.level is Level.WARNING and "2.00 GiB" in found.says


def test_huge_pages_that_are_off_and_strict_overcommit(tmp_path: Path) -> None:
    enabled, overcommit = "always madvise [never]\n", "2\n"
    found = look(
        machine(
            tmp_path,
            sys__kernel__mm__transparent_hugepage__enabled=enabled,
            proc__sys__vm__overcommit_memory=overcommit,
        )
    )
    assert found["huge pages"].level is found["overcommit"].level is Level.WARNING


def test_a_machine_without_proc_has_only_its_memory_to_tell(tmp_path: Path) -> None:
    assert set(look(tmp_path)) == {"memory"}


def test_limits_of_the_shell() -> None:
    (found,) = check_address_space({"v": 2**30, "d": None})
    assert found.level is Level.WARNING and "ulimit -v holds" in found.says and "ulimit -v unlimited" in found.todo
    assert not list(check_address_space({"v": None, "d": None}))


@pytest.mark.parametrize(("source", "is_told"), [("tsc", False), ("kvm-clock", False), ("hpet", True)])
def test_a_slow_clock(tmp_path: Path, source: str, is_told: bool) -> None:
    write(tmp_path, "sys/devices/system/clocksource/clocksource0/current_clocksource", f"{source}\n")
    assert bool(list(check_clock_source(tmp_path))) == is_told
