from __future__ import annotations

from typing import Any

import pytest

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request
from engine_core.sampling_params import SamplingParams


def create_cache(**overrides: Any) -> KVCacheManager:
    return KVCacheManager(**{"num_blocks": 8, "block_size": 4, "hash_seed": b"s", **overrides})


def create(tokens: list[int] | int, request_id: str = "r") -> Request:
    tokens = list(range(100, 100 + tokens)) if isinstance(tokens, int) else list(tokens)
    return Request(request_id, tokens, SamplingParams(max_tokens=9), max_total_tokens=10_000, rank=(0, 1))


def compute(cache: KVCacheManager, request: Request, num_tokens: int | None = None) -> list[int]:
    """Admit a request and compute its first tokens."""
    hits = cache.lookup(request)
    num_computed = len(hits) * cache.block_size
    num_new = (request.num_tokens if num_tokens is None else num_tokens) - num_computed
    block_ids = cache.allocate_slots(request, num_computed, num_new, hits)
    assert block_ids is not None
    cache.register_full_blocks(request, num_computed + num_new)
    request.num_computed_tokens = num_computed + num_new
    return block_ids


def release(cache: KVCacheManager, request: Request, *, is_suspect: bool = False) -> None:
    if is_suspect:
        cache.forget_suspect(request)
    cache.free(request)
    request.num_computed_tokens = 0


def test_l1_blocks_are_taken_as_slots_are_needed() -> None:
    cache, request = create_cache(), create(6)
    assert compute(cache, request, 3) == [1]
    assert cache.allocate_slots(request, 3, 1) == []
    assert cache.allocate_slots(request, 4, 2) == [2]
    assert request.block_ids == [1, 2]


def test_l1_a_failure_changes_nothing() -> None:
    cache, small, big = create_cache(num_blocks=3), create([1] * 5), create([2] * 12)
    compute(cache, small)
    order = cache.pool.get_free_order()
    assert cache.allocate_slots(big, 0, 12) is None
    assert big.block_ids == [] and cache.pool.get_free_order() == order and cache.num_reserved_blocks == 0
    assert cache.allocate_slots(small, 5, 12) is None
    assert small.block_ids == [1, 2] and small.num_registered_blocks == 1
    cache.check_invariants([small, big])


@pytest.mark.parametrize("num_tokens", range(1, 20))
def test_a4_the_predictor_equals_what_is_taken(num_tokens: int) -> None:
    cache = create_cache()
    old, holder = create(13, "old"), create(5, "holder")
    compute(cache, old)
    compute(cache, holder)
    release(cache, old)  # of its three cached blocks, one is still held
    request = create(num_tokens)
    hits = cache.lookup(request)
    assert len(hits) == min(3, (num_tokens - 1) // 4)
    predicted = cache.count_needed_blocks(request, num_tokens, hits)
    before = cache.pool.num_free
    compute(cache, request)
    assert before - cache.pool.num_free == predicted
    cache.check_invariants([holder, request])


def test_k3_lookup_is_pure_and_hashes_one_block_more_than_it_finds() -> None:
    cache = create_cache()
    first = create(12, "first")
    compute(cache, first)
    release(cache, first)
    order = cache.pool.get_free_order()
    request = create([*range(100, 108), *[7] * 40])
    assert cache.lookup(request) == cache.lookup(request) == [1, 2]
    assert len(request.block_digests) == 3
    assert cache.pool.get_free_order() == order and cache.pool.ref_counts == [0] * 9


def test_k3_a_lookup_is_remembered_until_blocks_come_or_go() -> None:
    cache, first, other = create_cache(), create(12, "first"), create([7] * 4, "other")
    compute(cache, first)
    request = create(13)
    hits = cache.lookup(request)
    assert cache.lookup(request) is hits
    compute(cache, other)
    assert cache.lookup(request) is not hits and cache.lookup(request) == hits


def test_k3_a_lookup_is_not_remembered_once_the_request_has_grown() -> None:
    cache, first, request = create_cache(), create(4, "first"), create(4)
    compute(cache, first)
    assert cache.lookup(request) == []
    request.append_output(7)
    assert cache.lookup(request) == [1]


@pytest.mark.parametrize(("num_tokens", "num_hits"), [(4, 0), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)])
def test_k5_the_last_token_is_never_a_hit(num_tokens: int, num_hits: int) -> None:
    cache, first = create_cache(), create(13, "first")
    compute(cache, first)
    assert len(cache.lookup(create(num_tokens))) == num_hits


def test_k1_only_full_blocks_are_found() -> None:
    cache, first = create_cache(), create(7, "first")
    compute(cache, first)
    assert cache.lookup(create(9)) == [1]


def test_k7_blocks_are_findable_as_soon_as_they_are_scheduled() -> None:
    cache, first = create_cache(), create(12, "first")
    compute(cache, first, 6)
    assert cache.lookup(create(13)) == [1]
    cache.allocate_slots(first, 6, 2)
    cache.register_full_blocks(first, 8)
    assert cache.lookup(create(13)) == [1, 2]


def test_k7a_a_block_completed_by_an_output_is_registered_when_that_token_is_computed() -> None:
    cache, first = create_cache(), create(7, "first")
    compute(cache, first)
    first.append_output(50)
    longer = create([*first.all_token_ids, 1])
    assert cache.lookup(longer) == [1]
    assert cache.allocate_slots(first, 7, 1) == []
    cache.register_full_blocks(first, 8)
    assert cache.lookup(longer) == [1, 2]


def test_k9_an_equal_last_block_stays_the_requests_own() -> None:
    cache, one, two = create_cache(), create(8, "one"), create(8, "two")
    compute(cache, one)
    compute(cache, two)
    assert (one.block_ids, two.block_ids) == ([1, 2], [1, 3])
    assert cache.pool.digests[3] is None
    cache.check_invariants([one, two])


def test_p7_without_caching_nothing_is_hashed_or_found() -> None:
    cache, first = create_cache(enable_prefix_caching=False), create(12, "first")
    compute(cache, first)
    release(cache, first)
    assert list(cache.lookup(create(12))) == [] and first.block_digests == [] and not cache.pool.index
    assert cache.pool.get_free_order() == list(range(1, 9))


def test_v6_digests_outlive_the_blocks() -> None:
    cache, request = create_cache(), create(9)
    compute(cache, request)
    digests = list(request.block_digests)
    release(cache, request)
    assert (request.block_ids, request.num_registered_blocks, request.block_digests) == ([], 0, digests)
    assert cache.lookup(request) == [1, 2]


def test_a5_blocks_promised_to_a_partly_computed_prompt_are_taken() -> None:
    cache, first, second = create_cache(), create(20, "first"), create([7] * 16, "second")
    compute(cache, first, 4)
    assert cache.num_reserved_blocks == 4 and cache.pool.num_free == 7
    assert cache.count_missing_blocks(second, [], 1, is_alone=False) == 1
    assert cache.count_missing_blocks(create([7] * 12), [], 1, is_alone=False) == 0
    cache.allocate_slots(first, 4, 10)
    assert cache.num_reserved_blocks == 1 and cache.pool.num_free == 4
    cache.allocate_slots(first, 14, 6)
    assert cache.num_reserved_blocks == 0
    compute(cache, second, 4)
    release(cache, second)
    assert cache.num_reserved_blocks == 0


def test_a4_hits_in_the_free_queue_are_not_free_twice() -> None:
    cache, first, other = create_cache(num_blocks=3), create(8, "first"), create([7] * 4, "other")
    compute(cache, first)
    release(cache, first)
    compute(cache, other)
    request = create(9)
    hits = cache.lookup(request)
    # Two free blocks are left and both are its hits: the third has nowhere to go.
    assert len(hits) == 2 and cache.count_missing_blocks(request, hits, 1, is_alone=True) == 1


def test_a6_an_allocation_does_not_evict_its_own_hits() -> None:
    cache, first = create_cache(num_blocks=4), create(8, "first")
    compute(cache, first)
    release(cache, first)
    request = create([*range(100, 108), *[7] * 8])
    compute(cache, request)
    assert request.block_ids[:2] == [1, 2] and cache.pool.num_free == 0
    cache.check_invariants([request])


@pytest.mark.parametrize(("watermark", "num_blocks", "expected"), [(0.2, 19, 4), (0.01, 98, 0), (0.01, 99, 1)])
def test_b8_the_watermark_counts_the_null_block(watermark: float, num_blocks: int, expected: int) -> None:
    assert create_cache(watermark=watermark, num_blocks=num_blocks).num_watermark_blocks == expected


def test_k7_suspect_kv_is_forgotten_unless_somebody_else_vouches_for_it() -> None:
    cache, good, bad = create_cache(), create(9, "good"), create([*range(100, 108), 1, 2, 3, 4, 5], "bad")
    compute(cache, good)
    compute(cache, bad)
    release(cache, bad, is_suspect=True)
    assert cache.lookup(create([*bad.all_token_ids])) == [1, 2]
    release(cache, good, is_suspect=True)
    assert cache.lookup(create(9)) == [] and not cache.pool.index
    cache.check_invariants([])


def test_k12_reset_only_when_nobody_owns_anything() -> None:
    cache, first = create_cache(), create(9, "first")
    compute(cache, first)
    assert not cache.try_reset_prefix_cache()
    release(cache, first)
    assert cache.try_reset_prefix_cache()
    assert cache.lookup(create(9)) == []


def test_bug41_a_shared_stem_is_counted_once() -> None:
    cache = create_cache()
    requests = [create([*range(100, 108), i], str(i)) for i in range(3)]
    for request in requests:
        compute(cache, request)
    assert cache.pool.num_free == 8 - 2 - 3
    for request in requests:
        release(cache, request)
    assert cache.pool.num_free == 8


def test_two_caches_without_a_seed_name_the_same_tokens_differently() -> None:
    chains = []
    for _ in range(2):
        request = create(4)
        compute(KVCacheManager(num_blocks=2, block_size=4), request)
        chains.append(request.block_digests)
    assert chains[0] != chains[1]
