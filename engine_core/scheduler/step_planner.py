"""StepPlanner: who gets how many tokens in the next step. The heart of the scheduler, on one page.

RUNNING requests are asked first, then the head of the queue, and both by the same question: how far is it from
``num_computed_tokens`` to ``num_tokens_with_spec``? Writes counters of requests; leaves their status to the Lifecycle.

Source: scheduler.md 1.3 to 1.5, 1.8, 1.9; after vLLM V1.
"""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.config import SchedulerConfig
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.constraint import Constraint, Verdict
from engine_core.scheduler.counters import StepCounters
from engine_core.scheduler.lifecycle import Lifecycle
from engine_core.scheduler.step_limits import StepLimits
from engine_core.scheduler.step_plan import Refusal, ScheduledRow, ScheduledStep, StepPlan

# A running request that is held back for this many steps in which nobody else moves will never get work.
_MAX_STALLS = 2


class StepPlanner:
    """Fills one StepPlan a step.

    Args:
        config: Policy.
        limits: What a step may hold; read at each one.
        kv_cache: Where slots come from.
        lifecycle: Where the requests stand.
        constraints: The features that are on.
        counters: Counts preemptions, lookups and stalls.
    """

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        limits: StepLimits,
        kv_cache: KVCacheManager,
        lifecycle: Lifecycle,
        constraints: Sequence[Constraint],
        counters: StepCounters,
    ) -> None:
        self._limits = limits
        self._is_priority = config.policy == "priority"
        self._kv_cache = kv_cache
        self._lifecycle = lifecycle
        self._counters = counters
        self._constraints = constraints
        # Chosen once: a hook that a constraint does not override costs nothing.
        self._gates = [c for c in constraints if c.overrides("gate")]
        self._caps = [c for c in constraints if c.overrides("cap")]
        self._commits = [c.commit for c in constraints if c.overrides("commit")]
        self._has_decode_lane = not any(
            c.touches_decode for c in constraints if c.overrides("cap") or c.overrides("commit")
        )
        self._num_stalls = 0

    def plan(self, now: float, in_flight: Sequence[ScheduledStep], *, is_admitting: bool) -> StepPlan:
        """Decide the next step.

        RUNNING requests first: they hold blocks, and their clients are reading. WAITING ones only if nobody had to
        give up blocks for that, or those just taken away would be handed out again.

        Args:
            now: Seconds on the engine's clock.
            in_flight: Steps whose results have not been applied.
            is_admitting: Whether anybody may be admitted.
        """
        plan = StepPlan(now, self._limits.max_num_batched_tokens, in_flight)
        for constraint in self._constraints:
            constraint.begin_step(plan, self._lifecycle.running)
        num_displaced = self._displace_for_head(plan) if is_admitting and self._is_priority else 0
        self._schedule_running(plan)
        if is_admitting and len(plan.preempted) == num_displaced:
            self._schedule_waiting(plan)
        self._check_progress(plan)
        return plan

    def _schedule_running(self, plan: StepPlan) -> None:
        """The plain decodes' lane is inline: one comparison and two additions a request; all else is asked about.

        A victim leaves from the tail while the loop runs, which a list's iterator takes well; it stands behind the
        requester, or is the requester, hence is not yet part of this step.
        """
        budget = plan.token_budget
        add, add_start = plan.decodes.append, plan.decode_starts.append
        for request in self._lifecycle.running:
            if budget <= 0:
                break
            num_computed = request.num_computed_tokens
            if num_computed >= request.decode_until and not self._try_go_on(request, plan):
                plan.token_budget = budget
                self._schedule_one(request, plan)
                budget = plan.token_budget
                continue
            request.num_computed_tokens = num_computed + 1
            request.num_tokens_with_spec += 1
            budget -= 1
            add(request)
            add_start(num_computed)
        plan.token_budget = budget

    def _try_go_on(self, request: Request, plan: StepPlan) -> bool:
        """Tell whether a request that has used up its slots may decode on in a fresh block."""
        if not request.decode_until or request.decode_until == request.max_total_tokens - 1:
            return False
        block = self._kv_cache.try_add_block(request)
        if block is None:
            return False
        plan.add_blocks(request, [block])
        request.decode_until = min(request.num_slots, request.max_total_tokens - 1)
        return True

    def _schedule_one(self, request: Request, plan: StepPlan) -> None:
        start = request.num_computed_tokens
        num_new = self._num_tokens_to_schedule(request, start, plan)
        if num_new == 0:
            return
        block_ids = self._kv_cache.allocate_slots(request, start, num_new)
        if block_ids is None and request.draft_token_ids:
            # Drafts are a luxury: nobody is preempted for them.
            num_new = min(num_new, request.num_tokens_with_spec - len(request.draft_token_ids) - start)
            block_ids = self._kv_cache.allocate_slots(request, start, num_new)
        while block_ids is None:
            if not self._preempt_for(request, plan):
                return
            block_ids = self._kv_cache.allocate_slots(request, start, num_new)
        if block_ids:
            plan.add_blocks(request, block_ids)
        self._commit(request, start, num_new, plan)

    def _schedule_waiting(self, plan: StepPlan) -> None:
        while plan.token_budget > 0 and len(self._lifecycle.running) < self._limits.max_num_seqs:
            request = self._lifecycle.waiting.peek()
            if request is None or request in plan.preempted:
                break
            verdict = self._try_admit(request, plan)
            if verdict is Verdict.STOP:
                if self._lifecycle.running or plan.in_flight:
                    break
                # Nothing will ever change for it: nobody is left to give anything back.
                self._lifecycle.fail_later(request, "The request cannot be scheduled although nothing else is running.")
            elif verdict is Verdict.SKIP:
                self._lifecycle.set_head_aside()
        self._lifecycle.return_set_aside()

    def _try_admit(self, request: Request, plan: StepPlan) -> Verdict:
        """Move the head of the queue to the running ones, or leave everything exactly as it was."""
        verdict = self._ask_gates(request, plan)
        if verdict is not Verdict.ADMIT:
            return verdict
        hits = self._kv_cache.lookup(request)
        start = len(hits) * self._kv_cache.block_size
        num_new = self._num_tokens_to_schedule(request, start, plan)
        if num_new == 0:
            return Verdict.STOP
        if self._kv_cache.count_missing_blocks(request, hits, num_new, is_alone=not self._lifecycle.running) > 0:
            return Verdict.STOP
        block_ids = self._kv_cache.allocate_slots(request, start, num_new, hits)
        assert block_ids is not None, "count_missing_blocks() promised these blocks"
        is_resumed = request.status is RequestStatus.PREEMPTED
        if not is_resumed:
            request.num_cached_tokens = start
        if self._kv_cache.enable_prefix_caching:
            self._counters.count_lookup(request.num_tokens, start, is_resumed=is_resumed)
        plan.add_entering(request, start)
        self._lifecycle.start_head(request, plan.now)
        self._commit(request, start, num_new, plan)
        return Verdict.ADMIT

    def _ask_gates(self, request: Request, plan: StepPlan) -> Verdict:
        for constraint in self._gates:
            verdict = constraint.gate(request, plan)
            if verdict is not Verdict.ADMIT:
                plan.refusals[request.request_id] = Refusal(type(constraint).__name__, verdict is Verdict.SKIP)
                return verdict
        return Verdict.ADMIT

    # ------------------------------------------------- shared by both phases

    def _num_tokens_to_schedule(self, request: Request, start: int, plan: StepPlan) -> int:
        """Return how many tokens to compute after the first ``start``; 0 = none in this step.

        The last token of all needs no KV: where the step that samples it is in flight, nothing is left to do. So a
        request that ends by length is never given a step too many, however many are in flight.
        """
        num_new = min(request.num_tokens_with_spec, request.max_total_tokens - 1) - start
        if num_new > plan.token_budget:
            num_new = plan.token_budget
        for constraint in self._caps:
            if num_new <= 0:
                break
            num_new = constraint.cap(request, start, num_new, plan)
            if num_new <= 0:
                plan.refusals[request.request_id] = Refusal(type(constraint).__name__, is_passed_by=False)
        return max(num_new, 0)

    def _commit(self, request: Request, start: int, num_new: int, plan: StepPlan) -> None:
        """Give a request its tokens. Nothing is ever taken back within the step."""
        end = start + num_new
        num_known = request.num_tokens_with_spec - len(request.draft_token_ids)
        is_sampling = end >= num_known
        num_drafts = max(0, end - num_known)
        row = ScheduledRow(request, start, num_new, num_drafts, is_sampling)
        plan.add_row(row)
        for commit in self._commits:
            commit(request, start, num_new, plan)
        if not row.is_decode:  # those register their blocks when the result is in
            self._kv_cache.register_full_blocks(request, min(end, request.num_tokens))
        request.num_computed_tokens = end
        request.draft_token_ids = []
        request.num_tokens_with_spec = num_known
        if is_sampling:
            request.num_tokens_with_spec += num_drafts + 1
            if self._has_decode_lane:
                request.decode_until = min(request.num_slots, request.max_total_tokens - 1)

    def _preempt_for(self, request: Request, plan: StepPlan) -> bool:
        """Take the blocks of the last running request. False: no blocks for the requester in this step.

        Ends: alone, any request fits, because ``max_total_tokens`` is bounded by the pool. A victim whose blocks all
        have other owners would give nothing; only the first in line, who must always advance, goes on to the next.
        """
        victim = self._lifecycle.running[-1]
        if request is not self._lifecycle.running[0] and not self._kv_cache.count_exclusive_blocks(victim):
            return False
        self._preempt_tail(plan)
        return victim is not request

    def _preempt_tail(self, plan: StepPlan) -> None:
        victim = self._lifecycle.running[-1]
        plan.preempted.append(self._lifecycle.preempt_tail(sum(victim in step for step in plan.in_flight)))
        self._counters.num_preempted += 1

    # ------------------------------------------------------------ priority

    def _displace_for_head(self, plan: StepPlan) -> int:
        """Let the last running request make way for a strictly more urgent one that waits; return how many did: 0, 1.

        Before anybody is scheduled, so that the victim is not part of the step; and only where the head will get in
        by it, in this step or, if it needs the blocks of several victims, in one of the next.

        Source: scheduler.md Q7.
        """
        head, running = self._lifecycle.waiting.peek(), self._lifecycle.running
        if head is None or not running or head.rank[0] >= running[-1].rank[0]:
            return 0
        if len(running) > self._limits.max_num_seqs:  # lowered: one victim would not give the head a seat
            return 0
        victim, lacks_seat = running[-1], len(running) >= self._limits.max_num_seqs
        hits = self._kv_cache.lookup(head)
        probe = StepPlan(plan.now, self._count_spare_tokens(plan), plan.in_flight)
        num_new = self._num_tokens_to_schedule(head, len(hits) * self._kv_cache.block_size, probe)
        if num_new == 0 or self._ask_gates(head, plan) is not Verdict.ADMIT:
            return 0
        lacks_blocks = self._kv_cache.count_missing_blocks(head, hits, num_new, is_alone=False) > 0
        if not (lacks_seat or lacks_blocks):
            return 0
        less_urgent = [request for request in running if request.rank[0] > head.rank[0]]
        if not lacks_seat and not self._kv_cache.count_exclusive_blocks(victim, hits):
            return 0
        is_alone = len(less_urgent) == len(running)
        if self._kv_cache.count_missing_blocks(head, hits, num_new, is_alone=is_alone, without=less_urgent) > 0:
            return 0
        self._preempt_tail(plan)
        return 1

    def _count_spare_tokens(self, plan: StepPlan) -> int:
        """Return the tokens that the running requests, less the last, will leave in this step."""
        wanted = (
            self._num_tokens_to_schedule(request, request.num_computed_tokens, plan)
            for request in self._lifecycle.running[:-1]
        )
        return max(0, plan.token_budget - sum(wanted))

    # ---------------------------------------------------------------- progress

    def _check_progress(self, plan: StepPlan) -> None:
        """End the first running request if nothing can move any more, rather than wait for ever."""
        if not plan.is_empty or plan.in_flight or not self._lifecycle.running:
            self._num_stalls = 0
            return
        self._num_stalls += 1
        self._counters.num_stalls += 1
        if self._num_stalls >= _MAX_STALLS:
            self._num_stalls = 0
            self._lifecycle.fail_later(
                self._lifecycle.running[0], "The running request cannot get any more tokens scheduled."
            )
            self._lifecycle.sweep_running()
