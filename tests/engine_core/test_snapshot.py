from __future__ import annotations

from itertools import chain, repeat

import pytest

from engine_core.snapshot import CACHED, FREE, SHARED, BlockMap


def create_map(num_blocks: int, *tables: list[int], cached: tuple[int, ...] = ()) -> BlockMap:
    digests = [b"x" if block in cached else None for block in range(num_blocks + 1)]
    owned = set(chain.from_iterable(tables))
    return BlockMap(num_blocks, num_blocks - len(owned), tables, digests)


def unroll(runs: list[tuple[int, int]]) -> list[int]:
    return list(chain.from_iterable(repeat(what, count) for what, count in runs))


def test_each_block_shows_who_holds_it_and_the_null_block_is_not_there() -> None:
    blocks = create_map(6, [1, 2], [2, 4], cached=(2, 4, 5))
    assert blocks.list_owners() == [0, SHARED, FREE, 1, CACHED, FREE], "a block in use may be found too, as every other"


def test_a_small_map_has_a_cell_a_block_and_runs_say_the_same() -> None:
    owners = create_map(8, [1, 2, 3], cached=(5, 6)).list_owners()
    per_cell, runs = create_map(8).build_cells(owners, max_cells=8)
    assert (per_cell, runs) == (1, [(0, 3), (FREE, 1), (CACHED, 2), (FREE, 2)])
    assert unroll(runs) == owners


def test_a_large_map_shows_what_most_of_a_cell_is_and_owners_where_it_is_undecided() -> None:
    owners = [0, 0, FREE, FREE, CACHED, FREE, FREE, FREE, 1, 0]
    per_cell, runs = create_map(10).build_cells(owners, max_cells=3)
    assert per_cell == 4
    assert unroll(runs) == [0, FREE, 1]


@pytest.mark.parametrize(("num_blocks", "num_cells"), [(1, 1), (1024, 1024), (1025, 513), (100_000, 1021)])
def test_no_map_has_more_cells_than_asked_for(num_blocks: int, num_cells: int) -> None:
    blocks = create_map(num_blocks)
    per_cell, runs = blocks.build_cells(blocks.list_owners(), max_cells=1024)
    assert len(unroll(runs)) == num_cells <= 1024
    assert per_cell * num_cells >= num_blocks
