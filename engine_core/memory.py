"""How much memory there is, and how many KV blocks are to be made of it. Reads /proc and cgroups, allocates nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from engine_core.config import CacheConfig
from engine_core.errors import CapacityError
from kernels.cgroup import cgroup_folders

_GIB = 2**30
# cgroup v2, then v1: limit, usage, and the rows of memory.stat that count files' pages, which make way when asked.
_CGROUP_FILES = (
    ("memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)
# Version 1 writes "no limit" as the largest number of whole pages.
_NO_LIMIT = 2**60


@dataclass(frozen=True, slots=True)
class CgroupMemory:
    """The tightest cgroup around this process.

    Attributes:
        limit_bytes: What all in it may take together.
        left_bytes: Of that, what nobody has taken; files' pages, which make way, count as not taken.
    """

    limit_bytes: int
    left_bytes: int


def available_bytes(root: Path = Path("/")) -> int:
    """Return the memory this process may still take: the machine's, or what its cgroup leaves, whichever is less.

    Args:
        root: Where ``proc`` and ``sys`` are; for tests.
    """
    available, cgroup = _meminfo_available(root), read_cgroup_memory(root)
    return available if cgroup is None else min(available, cgroup.left_bytes)


def read_cgroup_memory(root: Path = Path("/")) -> CgroupMemory | None:
    """Return the cgroup that leaves this process least, its own or one above; None = no limit.

    Args:
        root: Where ``proc`` and ``sys`` are; for tests.
    """
    found = [
        each for folder in cgroup_folders(root, "memory") for files in _CGROUP_FILES if (each := _read(folder, *files))
    ]
    return min(found, key=lambda cgroup: cgroup.left_bytes, default=None)


def _read(folder: Path, limit_file: str, usage_file: str, file_rows: tuple[str, ...]) -> CgroupMemory | None:
    limit, usage = _read_int(folder / limit_file), _read_int(folder / usage_file)
    if limit is None or usage is None or limit >= _NO_LIMIT:  # "max" is no number
        return None
    taken = max(0, usage - sum(_read_stat(folder / "memory.stat").get(row, 0) for row in file_rows))
    return CgroupMemory(limit, max(0, limit - taken))


def _read_stat(path: Path) -> dict[str, int]:
    try:
        return {name: int(value) for name, value in (line.split() for line in path.read_text().splitlines())}
    except (OSError, ValueError):
        return {}


def _meminfo_available(root: Path) -> int:
    try:
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    # No /proc (macOS): all physical memory is the best guess.
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read_int(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


@dataclass(frozen=True, slots=True)
class KVBudget:
    """How the KV pool was sized.

    Attributes:
        num_blocks: Usable blocks; the pool has one more, the null block.
        block_bytes: One block over all layers.
        block_size: Tokens a block.
        reason: What decided, in words.
    """

    num_blocks: int
    block_bytes: int
    block_size: int
    reason: str

    @property
    def num_tokens(self) -> int:
        return self.num_blocks * self.block_size


def size_kv_pool(
    cache: CacheConfig, *, block_bytes: int, max_model_len: int, max_num_seqs: int, available: int
) -> KVBudget:
    """Decide the number of KV blocks.

    Args:
        cache: Its ``num_blocks`` or ``kv_cache_bytes`` decides where given.
        block_bytes: One block over all layers.
        max_model_len: Context in tokens.
        max_num_seqs: Requests at once.
        available: Bytes that may still be taken.

    Raises:
        CapacityError: What was asked does not fit into memory, or not one block does.
    """
    full_request = -(-max_model_len // cache.block_size)
    if cache.num_blocks is not None:
        num_blocks, reason = cache.num_blocks, "num_kv_blocks"
    elif cache.kv_cache_bytes is not None:
        num_blocks, reason = cache.kv_cache_bytes // block_bytes - 1, "kv_cache_bytes"
    else:
        half, useful = available // 2 // block_bytes - 1, max_num_seqs * full_request
        num_blocks, reason = (
            (useful, f"{max_num_seqs} full-length requests") if useful <= half else (half, "half of the free memory")
        )
    if num_blocks < 1:
        raise CapacityError(
            f"the KV cache ({reason}) would hold no block of {block_bytes / 2**20:.1f} MiB; "
            f"{available / _GIB:.2f} GiB are free: give it more memory or use a smaller model"
        )
    needed = (num_blocks + 1) * block_bytes
    if needed > available:
        fits = available // block_bytes - 1
        raise CapacityError(
            f"{num_blocks} KV blocks need {needed / _GIB:.2f} GiB but {available / _GIB:.2f} GiB are free; "
            f"at most {max(fits, 0)} blocks fit: lower --num-kv-blocks or --kv-cache-bytes"
        )
    return KVBudget(num_blocks, block_bytes, cache.block_size, reason)


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What a card's memory is spoken for before there are KV blocks, in bytes.

    Attributes:
        total_bytes: The card's.
        taken_bytes: By the weights, and by whatever else is there, other programs included.
        step_bytes: By the largest step while it runs.
        graph_bytes: By CUDA graphs, set aside: they are captured over the KV blocks, hence after them.
    """

    total_bytes: int
    taken_bytes: int
    step_bytes: int
    graph_bytes: int

    def left_bytes(self, utilization: float) -> int:
        """Return what remains for KV blocks of the share that may be taken."""
        spoken_for = self.taken_bytes + self.step_bytes + self.graph_bytes + DEVICE_MARGIN_BYTES
        return max(0, int(self.total_bytes * utilization) - spoken_for)


# Kernels' code, cuBLAS's handles and the gaps of torch's allocator: nobody counts them.
DEVICE_MARGIN_BYTES = 256 << 20


def size_device_pool(
    cache: CacheConfig, *, block_bytes: int, max_model_len: int, max_num_seqs: int, use: DeviceUse
) -> KVBudget:
    """Decide the number of KV blocks on a card: all that ``gpu_memory_utilization`` leaves, as far as it is of use.

    Args:
        cache: Its ``num_blocks`` or ``kv_cache_bytes`` decides where given.
        block_bytes: One block over all layers.
        max_model_len: Context in tokens.
        max_num_seqs: Requests at once.
        use: Of the card's memory.

    Raises:
        CapacityError: What was asked does not fit on the card, or not one block does.
    """
    left = use.left_bytes(cache.gpu_memory_utilization)
    fits, useful = left // block_bytes - 1, max_num_seqs * -(-max_model_len // cache.block_size)
    if cache.num_blocks is not None:
        num_blocks, reason = cache.num_blocks, "num_kv_blocks"
    elif cache.kv_cache_bytes is not None:
        num_blocks, reason = cache.kv_cache_bytes // block_bytes - 1, "kv_cache_bytes"
    elif useful <= fits:
        num_blocks, reason = useful, f"{max_num_seqs} full-length requests"
    else:
        num_blocks, reason = fits, f"gpu_memory_utilization {cache.gpu_memory_utilization:g}"
    if num_blocks < 1 or num_blocks > fits:
        raise CapacityError(
            f"the KV cache ({reason}: {max(num_blocks, 0)} blocks of {block_bytes / 2**20:.2f} MiB) does not fit: "
            f"{_describe_use(use, cache.gpu_memory_utilization)}, which leaves room for {max(fits, 0)}; "
            f"{_advise(reason)}"
        )
    return KVBudget(num_blocks, block_bytes, cache.block_size, reason)


def _describe_use(use: DeviceUse, utilization: float) -> str:
    total, taken, step, graphs = (
        f"{each / _GIB:.2f}" for each in (use.total_bytes, use.taken_bytes, use.step_bytes, use.graph_bytes)
    )
    return (
        f"of the card's {total} GiB {utilization:.0%} may be taken, and {taken} are by the weights and by others, "
        f"{step} by the largest step and {graphs} by graphs"
    )


def _advise(reason: str) -> str:
    if reason in ("num_kv_blocks", "kv_cache_bytes"):
        return f"set --{reason.replace('_', '-')} to what fits, or raise --gpu-memory-utilization"
    return (
        "raise --gpu-memory-utilization, lower --max-num-batched-tokens or --max-num-seqs, stop what else is on the "
        "card, or use a smaller model"
    )


def effective_model_len(max_model_len: int, budget: KVBudget) -> int:
    """Return the context in tokens: a pool smaller than one full-length request lowers it (scheduler.md B9)."""
    return min(max_model_len, budget.num_tokens)
