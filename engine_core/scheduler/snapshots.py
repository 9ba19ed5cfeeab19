"""A scheduler as an EngineSnapshot. Runs on the engine's thread between two steps, so it copies and leaves the rest to
whoever looks."""

from __future__ import annotations

from collections.abc import Iterable

from engine_core.request import Request, RequestStatus
from engine_core.scheduler.explain import explain_parked, explain_running, explain_waiting
from engine_core.scheduler.scheduler import Scheduler
from engine_core.snapshot import BlockMap, EngineSnapshot, RequestSnapshot

# Nobody reads longer lists; with these the engine waits less than a millisecond.
MAX_RUNNING, MAX_WAITING = 512, 100

_STATUSES = {
    RequestStatus.WAITING: "waiting",
    RequestStatus.RUNNING: "running",
    RequestStatus.PREEMPTED: "preempted",
}


def build_snapshot(scheduler: Scheduler, now: float) -> EngineSnapshot:
    """Return what the scheduler holds.

    Args:
        scheduler: Between two calls.
        now: Seconds on the engine's clock.
    """
    running, pool = scheduler.running[:MAX_RUNNING], scheduler.kv_cache.pool
    parked = list(scheduler.parked.values())
    queued = scheduler.waiting.get_first(max(0, MAX_WAITING - len(parked)))
    parked_rows = _build_rows(parked, explain_parked(scheduler))
    return EngineSnapshot(
        time=now,
        max_num_seqs=scheduler.max_num_seqs,
        max_num_batched_tokens=scheduler.max_num_batched_tokens,
        num_running=len(scheduler.running),
        num_waiting=len(scheduler.waiting) + len(parked),
        running=_build_rows(running, explain_running(scheduler)),
        waiting=parked_rows[:MAX_WAITING] + _build_rows(queued, explain_waiting(scheduler, queued)),
        blocks=BlockMap(
            num_blocks=pool.num_blocks,
            num_free=pool.num_free,
            tables=[request.block_ids.copy() for request in scheduler.running],
            digests=pool.digests.copy(),
        ),
    )


def _build_rows(requests: Iterable[Request], reasons: Iterable[str]) -> tuple[RequestSnapshot, ...]:
    return tuple(map(_build_row, requests, reasons))


def _build_row(request: Request, reason: str) -> RequestSnapshot:
    return RequestSnapshot(
        request.request_id,
        _STATUSES[request.status],
        request.arrival_time,
        request.num_prompt_tokens,
        request.num_computed_tokens,
        request.num_tokens - request.num_prompt_tokens,
        request.num_cached_tokens,
        len(request.block_ids),
        request.num_preemptions,
        reason,
    )
