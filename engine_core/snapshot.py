"""What an engine looks like between two steps, for people who watch it. Plain values; nothing here can change it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

# What a cell of the block map shows where it is not the place of a running request.
FREE, CACHED, SHARED = -1, -2, -3


class RequestSnapshot(NamedTuple):
    """One live request. A tuple: hundreds are made between two steps, and a frozen dataclass takes thrice as long.

    Attributes:
        request_id: Whose.
        status: running, waiting or preempted.
        arrival_time: Seconds on the engine's clock.
        num_prompt_tokens: Of its prompt.
        num_computed_tokens: Leading tokens, prompt and output, whose KV exists or is being computed.
        num_output_tokens: Sampled so far.
        num_cached_tokens: Prompt tokens found in the prefix cache.
        num_blocks: KV blocks that it holds.
        num_preemptions: Times that its blocks were taken away.
        wait_reason: Why it gets no tokens, in words; empty where it does.
    """

    request_id: str
    status: str
    arrival_time: float
    num_prompt_tokens: int
    num_computed_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_blocks: int
    num_preemptions: int
    wait_reason: str


@dataclass(frozen=True, slots=True)
class BlockMap:
    """Which KV blocks are held by whom. Copies only, since the engine waits while it is made; whoever wants to look
    calls the methods, in his own time.

    Attributes:
        num_blocks: Usable blocks; ids are ``1..num_blocks``.
        num_free: Of those, with no owner.
        tables: The block table of each running request, in order of service.
        digests: Content by block id, None = unknown; block 0 is nobody's.
    """

    num_blocks: int
    num_free: int
    tables: Sequence[Sequence[int]]
    digests: Sequence[bytes | None]

    def list_owners(self) -> list[int]:
        """Return, for each usable block, the place of the running request that holds it, or FREE, CACHED or SHARED."""
        owners = [FREE if digest is None else CACHED for digest in self.digests]
        for place, table in enumerate(self.tables):
            for block in table:
                owners[block] = place if owners[block] in (FREE, CACHED) else SHARED
        return owners[1:]

    def build_cells(self, owners: Sequence[int], max_cells: int) -> tuple[int, list[tuple[int, int]]]:
        """Draw the map: one cell a block, or several neighbours a cell, which shows what most of them are.

        Args:
            owners: From ``list_owners``.
            max_cells: At most so many cells.

        Returns:
            Blocks a cell; and the cells in order, as runs of (what, how many).
        """
        per_cell = max(1, -(-len(owners) // max_cells))
        cells = owners
        if per_cell > 1:
            cells = [_pick(owners[start : start + per_cell]) for start in range(0, len(owners), per_cell)]
        return per_cell, [(what, sum(1 for _ in run)) for what, run in groupby(cells)]


@dataclass(frozen=True, slots=True)
class EngineSnapshot:
    """The engine between two steps.

    Attributes:
        time: When it was taken: seconds on the engine's clock.
        max_num_seqs: Requests running at once at most.
        max_num_batched_tokens: Tokens a step at most.
        num_running: Requests holding KV blocks.
        num_waiting: Requests without, preempted ones included.
        running: Those holding blocks, in order of service: all, or the first of them.
        waiting: The others likewise.
        blocks: The KV pool.
    """

    time: float
    max_num_seqs: int
    max_num_batched_tokens: int
    num_running: int
    num_waiting: int
    running: tuple[RequestSnapshot, ...]
    waiting: tuple[RequestSnapshot, ...]
    blocks: BlockMap


@dataclass(frozen=True, slots=True)
class TakeSnapshot:
    """What the engine's thread is asked for between two steps; the answer is an EngineSnapshot."""


def _pick(owners: Sequence[int]) -> int:
    """Return what most of these are; between equals, an owner rather than none."""
    counts = Counter(owners)
    return max(counts, key=lambda what: (counts[what], what >= 0, what))
