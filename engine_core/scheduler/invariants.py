"""What must hold of a scheduler between any two calls. Asserts; changes nothing.

Source: scheduler.md 2.2, I1 to I10.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.lifecycle import Lifecycle
from engine_core.scheduler.step_plan import ScheduledStep


def check_scheduler(
    lifecycle: Lifecycle, kv_cache: KVCacheManager, in_flight: Sequence[ScheduledStep], *, max_num_seqs: int
) -> None:
    """Assert all of it. Cheap when nothing runs, but for one pass over the block pool."""
    running, waiting, parked = lifecycle.running, lifecycle.waiting, lifecycle.parked
    assert len(running) <= max_num_seqs
    ranks = [request.rank for request in running]
    assert ranks == sorted(set(ranks))
    assert len(running) + len(waiting) + len(parked) == len(lifecycle.requests)
    for request in lifecycle.requests.values():
        is_running = request.status is RequestStatus.RUNNING
        places = (request in running, request.request_id in waiting, request.request_id in parked)
        assert sum(places) == 1 and places[0] == is_running and not request.status.is_finished
        _check_counters(request, in_flight)
        if is_running:
            num_registered_tokens = request.num_registered_blocks * kv_cache.block_size
            assert num_registered_tokens <= min(request.num_computed_tokens, request.num_tokens)
        else:
            assert not (request.block_ids or request.num_computed_tokens or request.decode_until)
            num_steps = sum(request in step for step in in_flight)
            assert request.num_steps_to_drain == (num_steps if places[2] else 0)
    kv_cache.check_invariants(running)


def _check_counters(request: Request, in_flight: Sequence[ScheduledStep]) -> None:
    assert request.num_tokens == len(request.all_token_ids) < request.max_total_tokens
    num_being_sampled = 0
    if request.num_steps_to_drain or request.status is RequestStatus.RUNNING:
        num_being_sampled = sum(_count_samples(step, request) for step in in_flight)
    num_drafts = len(request.draft_token_ids)
    assert request.num_tokens_with_spec == request.num_tokens + num_being_sampled + num_drafts
    assert 0 <= request.num_computed_tokens <= request.num_tokens_with_spec
    assert request.decode_until <= min(request.num_slots, request.max_total_tokens - 1)


def _count_samples(step: ScheduledStep, request: Request) -> int:
    if any(mine is request for mine in step.decodes):
        return 1
    return sum(row.num_drafts + 1 for row in step.rows if row.request is request and row.is_sampling)
