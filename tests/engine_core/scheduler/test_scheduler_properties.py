"""Random events over random configurations, against the oracle of scheduler.md 2.1.

After every call the invariants hold; every read of KV is right; every request ends once, with exactly the tokens that
it gets without any scheduler (hence with any pool, chunk, cache setting or neighbour); and nothing leaks.
"""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, given, settings

from tests.engine_core.scheduler.event_player import Add, Draft, Event, Player, all_events, configs, random_load

_settings = settings(
    max_examples=250, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)


@_settings
@given(config=configs(), events=all_events)
def test_every_request_ends_once_with_its_own_tokens(config: dict[str, Any], events: list[Event]) -> None:
    player = Player(config)
    player.play(events)
    player.drain()
    player.check_results()
    player.check_nothing_leaked()


@_settings
@given(config=configs(), events=all_events)
def test_f7_i21_abort_all_restores_an_empty_scheduler(config: dict[str, Any], events: list[Event]) -> None:
    player = Player(config)
    player.play(events)
    player.abort(*player.adds)
    assert not player.scheduler.has_unfinished_requests()
    player.drain()
    player.check_nothing_leaked()
    assert player.scheduler.kv_cache.try_reset_prefix_cache()


def test_i12_i15_seeded_loads_on_crowded_pools() -> None:
    seen: Counter[str] = Counter()
    for seed in range(80):
        config, events = random_load(random.Random(seed))
        player = Player(config)
        player.play(events)
        player.drain()
        player.check_results()
        player.check_nothing_leaked()
        seen += player.seen
        seen["failed"] += sum(last.error is not None for last in player.harness.last.values())
    # The load is what it claims to be.
    assert all(seen[kind] > 100 for kind in ("preemptions", "hits", "partial hits of resumed ones", "parked")), seen
    assert all(seen[kind] > 20 for kind in ("drafts", "displaced", "common prefixes")) and not seen["failed"], seen


def test_i15_cache_chunks_and_pool_size_change_no_token() -> None:
    """The same requests under very different regimes, compared with each other."""
    adds: list[Event] = [Add(12, (i % 3,) * (i % 4), 16, {"seed": i % 2}, i % 3) for i in range(10)]
    results = []
    for overrides in (
        {"num_blocks": 100},
        {"num_blocks": 100, "enable_prefix_caching": False},
        {"num_blocks": 8},
        {"num_blocks": 8, "enable_prefix_caching": False, "max_chunk_size": 1},
        {"num_blocks": 30, "block_size": 1, "long_prefill_token_threshold": 3},
        {"num_blocks": 9, "enable_chunked_prefill": False, "max_num_seqs": 2},
        {"num_blocks": 9, "max_steps_in_flight": 2},
        {"num_blocks": 14, "max_steps_in_flight": 3, "policy": "priority"},
    ):
        player = Player({**_PLAIN, **overrides})
        player.play([*adds, *[None, Draft(3, 2)] * 20])
        player.drain()
        player.check_nothing_leaked()
        results.append(player.harness.token_ids)
    assert all(result == results[0] for result in results)


_PLAIN: dict[str, Any] = {
    "block_size": 4,
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": True,
    "max_steps_in_flight": 1,
    "policy": "fcfs",
    "enable_cascade_attn": False,
    "max_chunk_size": 0,
    "long_prefill_token_threshold": 0,
    "enable_chunked_prefill": True,
}
