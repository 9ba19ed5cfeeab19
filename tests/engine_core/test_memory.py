"""Memory found, and KV blocks made of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine_core.config import CacheConfig
from engine_core.errors import CapacityError
from engine_core.memory import KVBudget, available_bytes, size_kv_pool

MIB = 2**20


def machine(root: Path, *, available_kib: int, cgroup: tuple[str, str] | None = None) -> Path:
    (root / "proc").mkdir(parents=True)
    (root / "proc/meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable:   {available_kib} kB\n")
    if cgroup:
        (root / "sys/fs/cgroup").mkdir(parents=True)
        (root / "sys/fs/cgroup/memory.max").write_text(cgroup[0])
        (root / "sys/fs/cgroup/memory.current").write_text(cgroup[1])
    return root


def size(available: int = 1000 * MIB, **cache: object) -> KVBudget:
    return size_kv_pool(
        CacheConfig(**cache),  # type: ignore[arg-type]
        block_bytes=MIB,
        max_model_len=640,
        max_num_seqs=4,
        available=available,
    )


def test_the_machine_decides_without_a_cgroup(tmp_path: Path) -> None:
    assert available_bytes(machine(tmp_path, available_kib=1000)) == 1000 * 1024


@pytest.mark.parametrize(
    ("cgroup", "expected"), [(("max\n", "5\n"), 1024000), (("3000\n", "1000\n"), 2000), (("10\n", "20\n"), 0)]
)
def test_the_cgroup_counts_where_it_is_tighter(tmp_path: Path, cgroup: tuple[str, str], expected: int) -> None:
    assert available_bytes(machine(tmp_path, available_kib=1000, cgroup=cgroup)) == expected


def test_full_length_requests_are_enough() -> None:
    budget = size()
    assert (budget.num_blocks, budget.num_tokens) == (40, 2560)
    assert "4 full-length requests" in budget.reason


def test_half_of_what_is_free_is_the_limit() -> None:
    assert size(available=20 * MIB).num_blocks == 9, "10 pages, of which one is the null page"


def test_flags_overrule() -> None:
    assert size(num_blocks=7).num_blocks == 7
    assert size(kv_cache_bytes=5 * MIB).num_blocks == 4


@pytest.mark.parametrize("cache", [{"num_blocks": 5000}, {"kv_cache_bytes": 5000 * MIB}])
def test_what_does_not_fit_is_refused_with_what_would(cache: dict[str, int]) -> None:
    with pytest.raises(CapacityError, match="at most 999 blocks fit"):
        size(**cache)


def test_no_block_at_all_is_refused() -> None:
    with pytest.raises(CapacityError, match="no block"):
        size(available=MIB)
    with pytest.raises(CapacityError, match="kv_cache_bytes"):
        size(kv_cache_bytes=MIB)
