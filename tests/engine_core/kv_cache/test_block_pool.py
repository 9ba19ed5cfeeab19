from __future__ import annotations

import random

import pytest

from engine_core.kv_cache.block_pool import BlockPool


def test_p1_p3_blocks_are_1_to_n_in_ascending_order() -> None:
    pool = BlockPool(4)
    assert pool.get_free_order() == [1, 2, 3, 4]
    assert pool.allocate(4) == [1, 2, 3, 4]
    assert pool.num_free == 0 and pool.get_free_order() == []
    pool.check_invariants()


def test_p4_allocating_past_the_end_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="past the end"):
        BlockPool(2).allocate(3)


def test_p4_allocating_nothing_changes_nothing() -> None:
    pool = BlockPool(2)
    assert pool.allocate(0) == []
    assert pool.get_free_order() == [1, 2]


def test_p5_unknown_blocks_go_to_the_head_known_ones_to_the_tail_last_first() -> None:
    pool = BlockPool(6)
    table = pool.allocate(3)
    pool.register(1, b"one")
    pool.register(2, b"two")
    pool.free(table)
    assert pool.get_free_order() == [3, 4, 5, 6, 2, 1]
    pool.check_invariants()


def test_f3_freeing_twice_is_a_bug() -> None:
    pool = BlockPool(2)
    table = pool.allocate(1)
    pool.free(table)
    with pytest.raises(AssertionError, match="freed twice"):
        pool.free(table)


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_p6_touch_takes_a_free_block_out_of_any_place(victim: int) -> None:
    pool = BlockPool(3)
    table = pool.allocate(3)
    for block in table:
        pool.register(block, bytes([block]))
    pool.free(table)
    block = pool.get_free_order()[victim]
    pool.touch([block])
    assert block not in pool.get_free_order() and pool.num_free == 2
    assert pool.index[bytes([block])] == block
    pool.touch([block])
    pool.free([block])
    assert pool.ref_counts[block] == 1 and pool.num_free == 2
    pool.free([block])
    assert pool.get_free_order()[-1] == block
    pool.check_invariants()


def test_k10_i7_a_reused_block_is_forgotten_first() -> None:
    pool = BlockPool(1)
    pool.register(pool.allocate(1)[0], b"x")
    pool.free([1])
    assert pool.index == {b"x": 1}
    pool.allocate(1)
    assert pool.index == {} and pool.digests[1] is None


def test_k9_a_twin_in_use_keeps_the_entry() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, b"x")
    pool.register(second, b"x")
    assert pool.index == {b"x": first} and pool.digests[second] is None
    pool.free([second])
    pool.allocate(1)
    assert pool.index == {b"x": first}
    pool.check_invariants()


def test_k9_bug31_a_twin_without_owner_loses_the_entry() -> None:
    pool = BlockPool(2)
    first, second = pool.allocate(2)
    pool.register(first, b"x")
    pool.free([first])
    pool.register(second, b"x")
    assert pool.index == {b"x": second} and pool.digests[first] is None
    assert pool.allocate(1) == [first]
    assert pool.index == {b"x": second}
    pool.free([second])
    pool.allocate(1)
    assert pool.index == {}
    pool.check_invariants()


def test_k12_reset_needs_an_unowned_pool_and_keeps_the_order() -> None:
    pool = BlockPool(3)
    table = pool.allocate(2)
    pool.register(1, b"x")
    assert not pool.try_reset_index() and pool.index
    pool.free(table)
    order = pool.get_free_order()
    assert pool.try_reset_index()
    assert pool.index == {} and pool.get_free_order() == order
    pool.check_invariants()


def test_forget_is_harmless_on_an_unknown_block() -> None:
    pool = BlockPool(1)
    pool.allocate(1)
    pool.forget(1)
    pool.register(1, b"x")
    pool.forget(1)
    assert pool.index == {}


def test_i1_bookkeeping_equals_a_plain_list_model() -> None:
    rng = random.Random(7)
    pool, order, owned = BlockPool(9), list(range(1, 10)), []
    for step in range(3000):
        if order and (not owned or rng.random() < 0.5):
            taken = pool.allocate(rng.randint(1, len(order)))
            assert taken == order[: len(taken)]
            order = order[len(taken) :]
            owned.append(taken)
            if rng.random() < 0.5:
                pool.register(taken[0], str(step).encode())
        else:
            table = owned.pop(rng.randrange(len(owned)))
            for block in reversed(table):
                order.insert(len(order) if pool.digests[block] is not None else 0, block)
            pool.free(table)
        assert pool.get_free_order() == order
        pool.check_invariants()
