"""Why a request gets no tokens, in words. Pure: reads a scheduler between two steps, and decides and moves nothing.

What the state tells is read from the state; what only the planner knew, which constraint said no and whether any tokens
were left, from the last step's plan. Constraints are not asked: some may count how often they are.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.request import Request, RequestStatus
from engine_core.scheduler.scheduler import PauseState, Scheduler
from engine_core.scheduler.step_plan import Refusal

_PARKED = "preempted; its last token is still being sampled"
_PAUSED, _ALL_PAUSED = "admission is paused", "everything is paused"
_NEXT = "next in line: the next step looks at it"


def explain_running(scheduler: Scheduler) -> list[str]:
    """Return, for each running request in order, why the last step had no tokens for it; empty where it had some."""
    if scheduler.pause_state is PauseState.PAUSED_ALL:
        return [_ALL_PAUSED] * len(scheduler.running)
    plan = scheduler.last_plan
    served = {request.request_id for request in plan.decodes}
    served.update(row.request.request_id for row in plan.rows)
    return [
        "" if request.request_id in served else _explain_left_out(scheduler, request) for request in scheduler.running
    ]


def explain_waiting(scheduler: Scheduler, waiting: Sequence[Request]) -> list[str]:
    """Return why each of these is not running.

    Nobody overtakes the first one that no constraint passes by: what that one lacks, those behind it wait for.

    Args:
        scheduler: Whose.
        waiting: The first of its waiting requests, in the order of the queue.
    """
    head: Request | None = None
    reasons = []
    for request in waiting:
        if head is not None:
            reason = f"behind request {head.request_id}"
        else:
            reason = _explain_head(scheduler, request)
            if not _is_passed_by(scheduler, request):
                head = request
        reasons.append(_mark_preempted(request, reason))
    return reasons


def explain_parked(scheduler: Scheduler) -> list[str]:
    """Return why each parked request may not even wait for admission yet."""
    return [_PARKED] * len(scheduler.parked)


def _explain_left_out(scheduler: Scheduler, request: Request) -> str:
    """Of a running request that the last step left out."""
    refusal = scheduler.last_plan.refusals.get(request.request_id)
    if refusal is not None:
        return _describe_refusal(refusal)
    if scheduler.last_plan.token_budget <= 0 and request.num_computed_tokens < request.num_tokens:
        return _describe_budget(scheduler)
    return ""  # nothing of it is left to compute: what is being sampled ends it


def _explain_head(scheduler: Scheduler, request: Request) -> str:
    """Of the request that is next. In the order in which the planner asks."""
    if scheduler.pause_state is not PauseState.UNPAUSED:
        return _PAUSED
    num_running, max_num_seqs = len(scheduler.running), scheduler.max_num_seqs
    if num_running >= max_num_seqs:
        return f"max_num_seqs: {num_running} of {max_num_seqs} are running"
    if scheduler.last_plan.token_budget <= 0:
        return _describe_budget(scheduler)
    refusal = scheduler.last_plan.refusals.get(request.request_id)
    if refusal is not None:
        return _describe_refusal(refusal)
    return _describe_missing_blocks(scheduler, request) or _NEXT


def _describe_missing_blocks(scheduler: Scheduler, request: Request) -> str:
    """Return what the KV pool lacks for a request; empty where it lacks nothing."""
    kv_cache = scheduler.kv_cache
    hits = kv_cache.lookup(request)
    num_new_tokens = min(request.num_tokens - len(hits) * kv_cache.block_size, scheduler.max_num_batched_tokens)
    num_missing = kv_cache.count_missing_blocks(request, hits, num_new_tokens, is_alone=not scheduler.running)
    if num_missing <= 0:
        return ""
    num_needed, num_free = kv_cache.count_needed_blocks(request, request.num_tokens, hits), kv_cache.pool.num_free
    num_kept = num_missing + num_free - num_needed
    kept = f" beside {num_kept} kept for running requests" if num_kept > 0 else ""
    return f"KV blocks: needs {num_needed}{kept}, {num_free} free"


def _describe_budget(scheduler: Scheduler) -> str:
    return f"token budget: others take all {scheduler.max_num_batched_tokens} of a step"


def _describe_refusal(refusal: Refusal) -> str:
    return f"held back by {refusal.constraint}"


def _is_passed_by(scheduler: Scheduler, request: Request) -> bool:
    refusal = scheduler.last_plan.refusals.get(request.request_id)
    return refusal is not None and refusal.is_passed_by


def _mark_preempted(request: Request, reason: str) -> str:
    return f"preempted; {reason}" if request.status is RequestStatus.PREEMPTED else reason
