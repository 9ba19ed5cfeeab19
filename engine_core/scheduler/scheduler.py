"""Scheduler: which requests get how many tokens in the next step. A pure function of (state, events, now).

Reads no clock, draws no random number, and lets no order of a dict or set decide. Knows blocks through the
KVCacheManager only, and features through Constraints only.

Source: scheduler.md 1.2 to 1.5, 1.8, 1.9, 1.11, 1.13; after vLLM V1.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from engine_core.config import SchedulerConfig
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.messages import EngineCoreOutput, EngineCoreRequest
from engine_core.request import FINISH_REASONS, Rank, Request, RequestStatus
from engine_core.scheduler.constraint import Constraint, Verdict
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.scheduler.request_queue import RequestQueue, build_fcfs_rank
from engine_core.scheduler.step_plan import StepPlan
from engine_core.scheduler.stopping import check_stop
from engine_core.stats import SchedulerStats

# A running request that is held back for this many steps in which nobody else moves will never get work.
_MAX_STALLS = 2


@dataclass(slots=True)
class _Counts:
    """What happened since the last make_stats()."""

    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preempted: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0


def _get_rank(request: Request) -> Rank:
    return request.rank


class Scheduler:
    """Continuous batching over a paged KV cache.

    The caller's loop: ``add_request``/``abort_requests`` at any time; ``schedule``; run the step, unless it is empty;
    ``update_from_output``, also for an empty step, since it delivers what schedule() had to refuse.

    Attributes:
        requests: Every live request by id.
        waiting: Those without blocks.
        running: Those with blocks, sorted by rank: the head is served first, the tail is preempted first.
    """

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        max_model_len: int,
        constraints: Sequence[Constraint] = (),
    ) -> None:
        """Set up an empty scheduler.

        Args:
            config: Checked by EngineConfig.
            kv_cache: Owned by this scheduler from now on.
            max_model_len: Effective context, tokens.
            constraints: From build_constraints(config).
        """
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_num_seqs = config.max_num_seqs
        self.max_model_len = max_model_len
        self.kv_cache = kv_cache
        self.constraints = tuple(constraints)
        # Bound once: a hook that a constraint does not override costs nothing.
        self._gates = [c.gate for c in constraints if type(c).gate is not Constraint.gate]
        self._caps = [c.cap for c in constraints if type(c).cap is not Constraint.cap]
        self._commits = [c.commit for c in constraints if type(c).commit is not Constraint.commit]

        longest = min(max_model_len - 1, kv_cache.capacity_tokens)
        self._max_prompt_tokens = (
            longest if config.enable_chunked_prefill else min(longest, config.max_num_batched_tokens)
        )
        self.requests: dict[str, Request] = {}
        self.waiting = RequestQueue()
        self.running: list[Request] = []
        self._num_added = 0
        self._num_steps_in_flight = 0
        self._num_stalls = 0
        self._finished_req_ids: list[str] = []
        self._undelivered: list[EngineCoreOutput] = []
        self._counts = _Counts()

    # ------------------------------------------------------------------ events

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that the context and an empty KV pool can hold, one output token included."""
        return self._max_prompt_tokens

    def add_request(self, message: EngineCoreRequest) -> None:
        """Let a request wait for admission.

        Raises:
            ValueError: Its prompt could never run, or its id is taken.
        """
        num_prompt_tokens = len(message.prompt_token_ids)
        if not 1 <= num_prompt_tokens <= self.max_prompt_tokens:
            raise ValueError(
                f"a prompt must have 1 to {self.max_prompt_tokens} tokens (context {self.max_model_len}, "
                f"KV pool {self.kv_cache.capacity_tokens}), not {num_prompt_tokens}"
            )
        if message.request_id in self.requests:
            raise ValueError(f"request id {message.request_id!r} is in use; choose another")
        self._num_added += 1
        request = Request(
            request_id=message.request_id,
            all_token_ids=list(message.prompt_token_ids),
            sampling_params=message.sampling_params,
            # The last token is sampled but never fed back, so it may be one more than the pool has slots for.
            max_total_tokens=min(
                num_prompt_tokens + message.sampling_params.max_tokens,
                self.max_model_len,
                self.kv_cache.capacity_tokens + 1,
            ),
            rank=build_fcfs_rank(self._num_added),
            arrival_time=message.arrival_time,
        )
        self.requests[request.request_id] = request
        self.waiting.add(request)

    def abort_requests(self, request_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """End requests in any state; unknown and finished ids are ignored.

        Returns:
            The last output of each request that this ended.
        """
        outputs = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                outputs.append(self._finish(request, RequestStatus.FINISHED_ABORTED))
        self._sweep_running()
        return outputs

    def has_unfinished_requests(self) -> bool:
        """Tell whether any request is waiting or running."""
        return bool(self.requests)

    def has_pending_output(self) -> bool:
        """Tell whether one more round of schedule() and update_from_output() has news, even with no request left."""
        return bool(self._finished_req_ids or self._undelivered)

    # ---------------------------------------------------------------- the step

    def schedule(self, now: float) -> SchedulerOutput:
        """Decide the next step.

        RUNNING requests first: they hold blocks, and their clients are reading. WAITING ones only if nobody was
        preempted, or the blocks just taken away would be handed out again.

        Args:
            now: Seconds on the engine's clock.
        """
        plan = StepPlan(now=now, token_budget=self.max_num_batched_tokens)
        for constraint in self.constraints:
            constraint.begin_step(plan, self.running)
        self._schedule_running(plan)
        if not plan.preempted:
            self._schedule_waiting(plan)
        self._check_progress(plan)
        return self._emit(plan)

    def _schedule_running(self, plan: StepPlan) -> None:
        running = self.running
        index = 0
        # A victim leaves from the tail, never from before the index; hence it is not yet part of this step.
        while index < len(running) and plan.token_budget > 0:
            request = running[index]
            index += 1
            num_new = self._num_tokens_to_schedule(request, request.num_computed_tokens, plan)
            if num_new == 0:
                continue
            block_ids = self._allocate_or_preempt(request, num_new, plan)
            if block_ids is not None:
                self._commit(request, num_new, plan)
                plan.add_running(request, num_new, block_ids)

    def _schedule_waiting(self, plan: StepPlan) -> None:
        skipped = []
        while plan.token_budget > 0 and len(self.running) < self.max_num_seqs:
            request = self.waiting.peek()
            if request is None:
                break
            verdict = self._try_admit(request, plan)
            if verdict is Verdict.STOP:
                if self.running or self._num_steps_in_flight:
                    break
                # Nothing will ever change for it: nobody is left to give anything back.
                self._fail(request, "the request cannot be scheduled although nothing else is running")
                continue
            if verdict is Verdict.SKIP:
                skipped.append(self.waiting.pop())
        for request in skipped:
            self.waiting.add(request)

    def _try_admit(self, request: Request, plan: StepPlan) -> Verdict:
        """Move the head of the queue to the running ones, or leave everything exactly as it was."""
        for gate in self._gates:
            verdict = gate(request, plan)
            if verdict is not Verdict.ADMIT:
                return verdict
        hits = self.kv_cache.lookup(request)
        num_computed = len(hits) * self.kv_cache.block_size
        num_new = self._num_tokens_to_schedule(request, num_computed, plan)
        if num_new == 0 or not self.kv_cache.can_admit(request, hits, is_alone=not self.running):
            return Verdict.STOP
        block_ids = self.kv_cache.allocate_slots(request, num_computed, num_new, hits)
        assert block_ids is not None, "can_admit() promised these blocks"
        request.num_computed_tokens = num_computed
        if request.status is RequestStatus.WAITING:
            self._count_lookup(request, num_computed)
        self._commit(request, num_new, plan)
        plan.add_admitted(request, num_new)
        self._start_running(request)
        return Verdict.ADMIT

    # ------------------------------------------------- shared by both phases

    def _num_tokens_to_schedule(self, request: Request, num_computed: int, plan: StepPlan) -> int:
        """Return how many tokens to compute after the first ``num_computed``; 0 = none in this step."""
        num_new = min(request.num_tokens_with_spec - num_computed, plan.token_budget)
        for cap in self._caps:
            if num_new == 0:
                break
            num_new = cap(request, num_computed, num_new, plan)
        return num_new

    def _commit(self, request: Request, num_new: int, plan: StepPlan) -> None:
        num_computed = request.num_computed_tokens
        if num_new > 1 or num_computed < request.num_prompt_tokens:
            self._counts.num_prompt_tokens += num_new
        for commit in self._commits:
            commit(request, num_computed, num_new, plan)

    def _start_running(self, request: Request) -> None:
        popped = self.waiting.pop()
        assert popped is request, "only the head of the queue is admitted"
        request.status = RequestStatus.RUNNING
        insort(self.running, request, key=_get_rank)

    def _count_lookup(self, request: Request, num_cached_tokens: int) -> None:
        """Count a first admission only: finding one's own blocks again after a preemption is no hit."""
        request.num_cached_tokens = num_cached_tokens
        self._counts.num_prefix_queries += request.num_prompt_tokens
        self._counts.num_prefix_hits += num_cached_tokens

    def _allocate_or_preempt(self, request: Request, num_new: int, plan: StepPlan) -> list[int] | None:
        """Return the request's new blocks, taking others' from the tail if need be; None if it was itself the tail.

        Ends: alone, any request fits, because ``max_total_tokens`` is bounded by the pool.
        """
        while True:
            block_ids = self.kv_cache.allocate_slots(request, request.num_computed_tokens, num_new)
            if block_ids is not None:
                return block_ids
            victim = self.running.pop()
            self._preempt(victim, plan)
            if victim is request:
                return None

    def _preempt(self, request: Request, plan: StepPlan) -> None:
        """Take a request's blocks and queue it again at its old rank.

        Nothing is saved: when it comes back, the ordinary prefix lookup finds what has survived.
        """
        self._release(request)
        request.status = RequestStatus.PREEMPTED
        request.num_computed_tokens = 0
        request.num_preemptions += 1
        plan.preempted.append(request)
        self._counts.num_preempted += 1
        self.waiting.add(request)

    def _check_progress(self, plan: StepPlan) -> None:
        """End the first running request if nothing can move any more, rather than wait for ever."""
        if plan.scheduled or self._num_steps_in_flight or not self.running:
            self._num_stalls = 0
            return
        self._num_stalls += 1
        if self._num_stalls >= _MAX_STALLS:
            self._num_stalls = 0
            self._fail(self.running[0], "the running request cannot get any more tokens scheduled")
            self._sweep_running()

    def _emit(self, plan: StepPlan) -> SchedulerOutput:
        output = plan.build_output(self._finished_req_ids)
        self._finished_req_ids = []
        for request, num_new in plan.scheduled:
            request.num_computed_tokens += num_new
        for constraint in self.constraints:
            constraint.annotate(output)
        if plan.scheduled:
            self._num_steps_in_flight += 1
        return output

    # ---------------------------------------------------------- after the step

    def update_from_output(self, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> list[EngineCoreOutput]:
        """Append what the step sampled, and end what has come to its end.

        Args:
            scheduled: What schedule() returned; once each, in order.
            result: What the model runner made of it; empty if there was nothing to run.

        Returns:
            One output per request that has news. A chunk of a prompt is none.
        """
        if scheduled.total_num_scheduled_tokens:
            self._num_steps_in_flight -= 1
        outputs, self._undelivered = self._undelivered, []
        for request_id in scheduled.num_scheduled_tokens:
            request = self.requests.get(request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                continue  # aborted while the step ran
            error = result.errors.get(request_id)
            if error is not None:
                outputs.append(self._finish(request, RequestStatus.FINISHED_ERROR, error=error))
                continue
            token_ids = result.sampled_token_ids.get(request_id, [])
            # Sampling happens exactly where the step reached the last known token.
            is_at_end = request.num_computed_tokens == request.num_tokens
            assert bool(token_ids) == is_at_end, (
                f"{request_id}: a sample is due at the last known token, and only there"
            )
            if token_ids:
                outputs.append(self._append(request, token_ids))
        self._sweep_running()
        return outputs

    def _append(self, request: Request, token_ids: list[int]) -> EngineCoreOutput:
        for count, token_id in enumerate(token_ids, start=1):
            request.append_output(token_id)
            self._counts.num_generation_tokens += 1
            stop = check_stop(request)
            if stop is not None:
                status, stop_token_id = stop
                return self._finish(request, status, token_ids[:count], stop_token_id=stop_token_id)
        return EngineCoreOutput(request.request_id, token_ids, num_cached_tokens=request.num_cached_tokens)

    def make_stats(self, step_time_s: float = 0.0) -> SchedulerStats:
        """Return the present state, and what happened since the last call."""
        counts, self._counts = self._counts, _Counts()
        return SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting),
            num_blocks=self.kv_cache.pool.num_blocks,
            num_free_blocks=self.kv_cache.pool.num_free,
            num_prompt_tokens=counts.num_prompt_tokens,
            num_generation_tokens=counts.num_generation_tokens,
            num_preempted=counts.num_preempted,
            num_prefix_queries=counts.num_prefix_queries,
            num_prefix_hits=counts.num_prefix_hits,
            step_time_s=step_time_s,
        )

    # ------------------------------------------------------------------ the end

    def _finish(
        self,
        request: Request,
        status: RequestStatus,
        token_ids: Sequence[int] = (),
        *,
        stop_token_id: int | None = None,
        error: str | None = None,
    ) -> EngineCoreOutput:
        """End a request once and for all. A running one stays in ``running`` until the caller sweeps."""
        if request.status is not RequestStatus.RUNNING:
            self.waiting.remove(request)
        self._release(request, is_suspect=status is RequestStatus.FINISHED_ERROR)
        request.status = status
        del self.requests[request.request_id]
        self._finished_req_ids.append(request.request_id)
        return EngineCoreOutput(
            request_id=request.request_id,
            new_token_ids=list(token_ids),
            finish_reason=FINISH_REASONS[status],
            stop_token_id=stop_token_id,
            num_cached_tokens=request.num_cached_tokens,
            error=error,
        )

    def _fail(self, request: Request, error: str) -> None:
        """End a request from within schedule(); update_from_output() tells its client."""
        self._undelivered.append(self._finish(request, RequestStatus.FINISHED_ERROR, error=error))

    def _sweep_running(self) -> None:
        """Drop the finished from ``running``: one pass, however many ended."""
        self.running = [request for request in self.running if request.status is RequestStatus.RUNNING]

    def _release(self, request: Request, *, is_suspect: bool = False) -> None:
        """The only place where a request gives back what it holds."""
        self.kv_cache.free(request, is_suspect=is_suspect)
        for constraint in self.constraints:
            constraint.release(request)

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls (scheduler.md I1 to I10). Cheap when nothing runs."""
        assert len(self.running) <= self.max_num_seqs
        ranks = [request.rank for request in self.running]
        assert ranks == sorted(set(ranks))
        assert len(self.running) + len(self.waiting) == len(self.requests)
        for request in self.requests.values():
            is_running = request.status is RequestStatus.RUNNING
            assert not request.status.is_finished
            assert is_running == (request in self.running) != (request.request_id in self.waiting)
            assert is_running or not (request.block_ids or request.num_computed_tokens)
            assert request.num_tokens == len(request.all_token_ids) < request.max_total_tokens
            assert 0 <= request.num_computed_tokens <= request.num_tokens_with_spec
            num_registered_tokens = request.num_registered_blocks * self.kv_cache.block_size
            assert num_registered_tokens <= min(request.num_computed_tokens, request.num_tokens)
        self.kv_cache.check_invariants(self.running)
