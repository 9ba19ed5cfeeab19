"""Memory found, and KV blocks made of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from engine_core.config import CacheConfig
from engine_core.errors import CapacityError
from engine_core.memory import (
    DEVICE_MARGIN_BYTES,
    DeviceUse,
    KVBudget,
    available_bytes,
    effective_model_len,
    read_cgroup_memory,
    size_device_pool,
    size_kv_pool,
)

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


@pytest.mark.parametrize("version", [1, 2])
def test_the_cgroup_of_this_process_counts_wherever_it_is(tmp_path: Path, version: int) -> None:
    root = machine(tmp_path, available_kib=1000)
    folder = root / "sys/fs/cgroup" / ("memory/a/b" if version == 1 else "a/b")
    folder.mkdir(parents=True)
    (root / "proc/self").mkdir()
    (root / "proc/self/cgroup").write_text("3:memory:/a/b\n" if version == 1 else "0::/a/b\n")
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    # The one above is tighter; its own has no limit.
    for place, limit, usage in ((folder, "9223372036854771712", "7"), (folder.parent, "5000", "4000")):
        for name, value in zip(names, (limit, usage), strict=True):
            (place / name).write_text(f"{value}\n")
    assert available_bytes(root) == 1000
    found = read_cgroup_memory(root)
    assert found is not None and (found.limit_bytes, found.left_bytes) == (5000, 1000)


@pytest.mark.parametrize("prefix", ["", "total_"])
def test_pages_of_files_that_were_read_do_not_count_as_taken(tmp_path: Path, prefix: str) -> None:
    root = machine(tmp_path, available_kib=1000, cgroup=("5000\n", "4000\n"))
    folder = root / "sys/fs/cgroup"
    if prefix:
        (folder / "memory.max").rename(folder / "memory.limit_in_bytes")
        (folder / "memory.current").rename(folder / "memory.usage_in_bytes")
    (folder / "memory.stat").write_text(f"anon 900\n{prefix}inactive_file 2500\n{prefix}active_file 500\n")
    assert available_bytes(root) == 4000


def test_without_a_limit_there_is_no_cgroup(tmp_path: Path) -> None:
    assert read_cgroup_memory(machine(tmp_path, available_kib=1000, cgroup=("max\n", "4000\n"))) is None


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


def test_a_pool_smaller_than_a_request_lowers_the_context() -> None:
    assert effective_model_len(640, size(num_blocks=7)) == 448
    assert effective_model_len(640, size(num_blocks=10)) == 640


# ---------------------------------------------------------------------- a card's
# Of 2,000 MiB, 1,800 may be taken; what is spoken for leaves 101 pages of a MiB, of which one is the null page.
USE = DeviceUse(
    total_bytes=2000 * MIB, taken_bytes=1000 * MIB, step_bytes=500 * MIB, graph_bytes=199 * MIB - DEVICE_MARGIN_BYTES
)


def size_on_card(use: DeviceUse = USE, max_num_seqs: int = 256, **cache: object) -> KVBudget:
    return size_device_pool(
        CacheConfig(block_size=16, **cache),  # type: ignore[arg-type]
        block_bytes=MIB,
        max_model_len=640,
        max_num_seqs=max_num_seqs,
        use=use,
    )


def test_a_cards_pool_is_what_utilisation_leaves() -> None:
    assert (size_on_card().num_blocks, size_on_card().reason) == (100, "gpu_memory_utilization 0.9")
    assert size_on_card(gpu_memory_utilization=1.0).num_blocks == 300


@pytest.mark.parametrize("name", ["taken_bytes", "step_bytes", "graph_bytes"])
def test_all_that_a_cards_memory_is_spoken_for_counts(name: str) -> None:
    assert size_on_card(replace(USE, **{name: getattr(USE, name) + 30 * MIB})).num_blocks == 70


def test_a_cards_pool_is_no_larger_than_is_of_use() -> None:
    budget = size_on_card(max_num_seqs=2)
    assert (budget.num_blocks, budget.reason) == (80, "2 full-length requests")


def test_flags_overrule_on_a_card_too() -> None:
    assert size_on_card(num_blocks=7).reason == "num_kv_blocks"
    assert size_on_card(kv_cache_bytes=5 * MIB).num_blocks == 4
    assert size_on_card(num_blocks=100).num_blocks == 100, "to the last block"


@pytest.mark.parametrize(
    ("cache", "told"),
    [
        ({"num_blocks": 101}, "num_kv_blocks: 101 blocks .* room for 100; set --num-kv-blocks"),
        ({"kv_cache_bytes": 200 * MIB}, "kv_cache_bytes: 199 blocks .* set --kv-cache-bytes"),
        ({"kv_cache_bytes": MIB}, "kv_cache_bytes: 0 blocks of 1.00 MiB"),
        ({"gpu_memory_utilization": 0.5}, "50% may be taken.* raise --gpu-memory-utilization, lower --max-num-batched"),
    ],
)
def test_what_does_not_fit_on_a_card_is_refused_with_what_to_change(cache: dict[str, object], told: str) -> None:
    with pytest.raises(CapacityError, match=told):
        size_on_card(**cache)
