from __future__ import annotations

import hashlib
import random
import struct

import pytest

from engine_core.kv_cache.block_hash import BlockHasher


def chain_of(tokens: list[int], *, block_size: int = 4, seed: bytes = b"s") -> list[bytes]:
    chain: list[bytes] = []
    BlockHasher(block_size=block_size, seed=seed).extend_chain(chain, tokens, len(tokens) // block_size)
    return chain


def test_k1_the_chain_is_sha256_over_parent_and_little_endian_int32() -> None:
    root = hashlib.sha256(b"s").digest()
    first = hashlib.sha256(root + struct.pack("<4i", 1, 2, 3, 4)).digest()
    second = hashlib.sha256(first + struct.pack("<4i", 5, 6, 7, 70_000)).digest()
    assert chain_of([1, 2, 3, 4, 5, 6, 7, 70_000]) == [first, second]


def test_k1_a_digest_stands_for_the_whole_prefix() -> None:
    one, other = chain_of([1, 2, 3, 4, 9, 9, 9, 9]), chain_of([1, 2, 3, 5, 9, 9, 9, 9])
    assert not set(one) & set(other)
    assert chain_of([1, 2, 3, 4])[0] == one[0]


def test_the_seed_separates_instances() -> None:
    assert chain_of([1, 2, 3, 4]) != chain_of([1, 2, 3, 4], seed=b"t")


@pytest.mark.parametrize("stops", [[0, 1, 2, 3], [3], [1, 3], [2, 2, 3, 1]])
def test_extending_in_pieces_gives_the_same_chain(stops: list[int]) -> None:
    tokens = list(range(15))  # the last block is not full
    hasher, chain = BlockHasher(block_size=4, seed=b"s"), []
    for num_blocks in stops:
        hasher.extend_chain(chain, tokens, num_blocks)
    assert chain == chain_of(tokens) and len(chain) == 3


def test_k2_a_salt_changes_every_digest_of_the_chain() -> None:
    chains: list[list[bytes]] = [[], [], [], []]
    hasher = BlockHasher(block_size=2, seed=b"s")
    for chain, salt in zip(chains, ("", "a", "b", "\ud800"), strict=True):
        hasher.extend_chain(chain, [1, 2, 3, 4], 1, salt)
        hasher.extend_chain(chain, [1, 2, 3, 4], 2, salt)
    assert len({digest for chain in chains for digest in chain}) == 8


def test_k2_f4_f10_a_salt_that_reads_like_a_block_of_tokens_is_no_block() -> None:
    """Field reports F4 and F10: parts of a key run into each other, and a salt names another client's prefix."""
    hasher = BlockHasher(block_size=2, seed=b"s")
    plain, forged = list[bytes](), list[bytes]()
    hasher.extend_chain(plain, [97, 98, 3, 4], 2)
    hasher.extend_chain(forged, [3, 4], 1, struct.pack("<2i", 97, 98).decode())
    assert forged[0] not in plain


def test_k3_digests_are_computed_when_they_are_reached() -> None:
    hasher, chain = BlockHasher(block_size=2, seed=b"s"), list[bytes]()
    digests = hasher.iter_chain(chain, list(range(200)), 100)
    assert chain == [] and next(digests) == chain[0] and len(chain) == 1
    assert [next(digests), next(digests)] == chain[1:] and len(chain) == 3
    again = list(hasher.iter_chain(chain, list(range(200)), 2))
    assert again == chain[:2] and len(chain) == 3


@pytest.mark.parametrize("salt", ["", "x"])
def test_remembered_runs_change_no_digest(salt: str) -> None:
    """Prefixes of every length, extended in every way, by a hasher that has seen much and by a fresh one each time."""
    rng = random.Random(1)
    seasoned = BlockHasher(block_size=2, seed=b"s")
    for _ in range(300):
        tokens = [*range(rng.randrange(60)), *(rng.randrange(3) for _ in range(rng.randrange(12)))]
        chains: list[list[bytes]] = []
        stops = sorted(rng.randint(0, len(tokens) // 2) for _ in range(3))
        for hasher in (seasoned, BlockHasher(block_size=2, seed=b"s")):
            chain: list[bytes] = []
            seen = [list(hasher.iter_chain(chain, tokens, stop, salt)) for stop in stops]
            assert [len(digests) for digests in seen] == stops and seen[-1] == chain[: stops[-1]]
            hasher.extend_chain(chain, tokens, len(tokens) // 2, salt)
            chains.append(chain)
        assert chains[0] == chains[1] and len(chains[0]) == len(tokens) // 2


def test_k1_k2_a_remembered_run_belongs_to_what_stands_before_it() -> None:
    run = [7] * 16
    hasher = BlockHasher(block_size=2, seed=b"s")
    digests = set()
    for before, salt in (([], ""), ([], "a"), ([1] * 16, ""), ([2] * 16, ""), ([2] * 16, "a")):
        chain, fresh = list[bytes](), list[bytes]()
        hasher.extend_chain(chain, before + run, (len(before) + 16) // 2, salt)
        BlockHasher(block_size=2, seed=b"s").extend_chain(fresh, before + run, (len(before) + 16) // 2, salt)
        assert chain == fresh
        digests |= set(chain[-8:])
    assert len(digests) == 5 * 8


def test_the_memory_for_runs_is_bounded() -> None:
    hasher = BlockHasher(block_size=4096, seed=b"s")
    for token in range(100):
        hasher.extend_chain([], [token] * (8 * 4096), 8)
    assert 0 < len(hasher._runs) <= 32
