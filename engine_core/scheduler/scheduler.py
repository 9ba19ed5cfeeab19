"""Scheduler: events in, steps out, results back in. A pure function of (state, events, now).

Reads no clock, draws no random number, and lets no order of a dict or set decide. Who gets what is the StepPlanner's
page; how requests move is the Lifecycle's; what results do is the ResultApplier's.

Source: scheduler.md 1.1, 1.12, 1.13, 1.14, 1.17.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from engine_core.config import SchedulerConfig
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, SetLimits
from engine_core.request import Request, RequestStatus
from engine_core.sampling_params import SamplingParams
from engine_core.scheduler.constraint import Constraint
from engine_core.scheduler.counters import StepCounters
from engine_core.scheduler.invariants import check_scheduler
from engine_core.scheduler.lifecycle import Lifecycle
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.scheduler.request_queue import RequestQueue, build_rank
from engine_core.scheduler.results import ResultApplier
from engine_core.scheduler.step_limits import StepLimits
from engine_core.scheduler.step_plan import ScheduledStep, StepPlan
from engine_core.scheduler.step_planner import StepPlanner
from engine_core.stats import SchedulerStats


class PauseState(enum.Enum):
    """What schedule() leaves alone for now."""

    UNPAUSED = enum.auto()
    PAUSED_NEW = enum.auto()  # nobody is admitted
    PAUSED_ALL = enum.auto()  # nobody gets a token; running requests keep their blocks


class Scheduler:
    """Continuous batching over a paged KV cache.

    The caller's loop: ``add_request``/``abort_requests`` at any time; ``schedule``; run the step, unless it is empty;
    ``update_from_output``, also for an empty step, since it delivers what schedule() had to refuse. Up to
    ``max_steps_in_flight`` steps may be scheduled before the results of the oldest are applied: the runner knows the
    tokens by then, and the scheduler needs only their number.

    Attributes:
        max_steps_in_flight: 1 = each step's result is applied before the next step is scheduled.
        last_plan: What the last look at the requests came upon; for whoever asks why one got no tokens.
    """

    def __init__(
        self,
        *,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        max_model_len: int,
        constraints: Sequence[Constraint] = (),
        max_steps_in_flight: int = 1,
    ) -> None:
        """Set up an empty scheduler.

        Args:
            config: Checked by EngineConfig.
            kv_cache: Owned by this scheduler from now on.
            max_model_len: Effective context, tokens.
            constraints: From build_constraints(config).
            max_steps_in_flight: At least 1.
        """
        self.max_model_len = max_model_len
        self.max_steps_in_flight = max_steps_in_flight
        self._pause_state = PauseState.UNPAUSED
        self.kv_cache = kv_cache
        self.constraints = tuple(constraints)
        self._is_priority = config.policy == "priority"
        self._is_higher_first = config.priority_order == "higher-first"

        longest = min(max_model_len - 1, kv_cache.capacity_tokens)
        self._max_prompt_tokens = (
            longest if config.enable_chunked_prefill else min(longest, config.max_num_batched_tokens)
        )
        # A prompt that is computed in one step, after a preemption with its outputs, needs a step that holds it.
        least = 1 if config.enable_chunked_prefill else min(max_model_len, config.max_num_batched_tokens)
        self._limits = StepLimits(config, min_num_batched_tokens=least)
        self._counters = StepCounters()
        self._lifecycle = Lifecycle(kv_cache=kv_cache, constraints=self.constraints)
        self._planner = StepPlanner(
            config=config,
            limits=self._limits,
            kv_cache=kv_cache,
            lifecycle=self._lifecycle,
            constraints=self.constraints,
            counters=self._counters,
        )
        self._results = ResultApplier(lifecycle=self._lifecycle, kv_cache=kv_cache, counters=self._counters)
        self._in_flight: deque[ScheduledStep] = deque()
        self.last_plan = StepPlan(0.0, config.max_num_batched_tokens)
        self._nobody = _build_nobody()
        self._num_added = 0
        self._num_outputs = 0

    # ------------------------------------------------------------------ state

    @property
    def max_prompt_tokens(self) -> int:
        """The longest prompt that the context and an empty KV pool can hold, one output token included."""
        return self._max_prompt_tokens

    @property
    def max_num_seqs(self) -> int:
        """At so many running requests nobody is admitted."""
        return self._limits.max_num_seqs

    @property
    def max_num_batched_tokens(self) -> int:
        """Tokens a step at most."""
        return self._limits.max_num_batched_tokens

    @property
    def requests(self) -> dict[str, Request]:
        """Every live request by id."""
        return self._lifecycle.requests

    @property
    def running(self) -> list[Request]:
        """Those with blocks, sorted by rank: the head is served first, the tail is preempted first."""
        return self._lifecycle.running

    @property
    def waiting(self) -> RequestQueue:
        """Those without blocks that may be admitted."""
        return self._lifecycle.waiting

    @property
    def parked(self) -> dict[str, Request]:
        """Preempted ones whose last output is under way."""
        return self._lifecycle.parked

    @property
    def pause_state(self) -> PauseState:
        """What schedule() leaves alone for now."""
        return self._pause_state

    @property
    def num_steps_in_flight(self) -> int:
        """Steps scheduled whose results have not been applied."""
        return len(self._in_flight)

    def has_unfinished_requests(self) -> bool:
        """Tell whether any request is waiting or running."""
        return bool(self._lifecycle.requests)

    def has_pending_output(self) -> bool:
        """Tell whether one more round of schedule() and update_from_output() has news, even with no request left."""
        return self._lifecycle.has_news or bool(self._in_flight)

    # ------------------------------------------------------------------ events

    def add_request(self, message: EngineCoreRequest) -> None:
        """Let a request wait for admission.

        Raises:
            ValueError: Its prompt could never run, or its id is taken.
        """
        num_prompt_tokens = len(message.prompt_token_ids)
        if not 1 <= num_prompt_tokens <= self.max_prompt_tokens:
            raise ValueError(
                f"A prompt must have 1 to {self.max_prompt_tokens} tokens (context {self.max_model_len}, "
                f"KV pool {self.kv_cache.capacity_tokens}), not {num_prompt_tokens}."
            )
        if message.request_id in self.requests:
            raise ValueError(f"Request id {message.request_id!r} is in use; choose another.")
        self._num_added += 1
        urgency = message.priority if self._is_priority else 0
        request = Request(
            request_id=message.request_id,
            prompt_token_ids=message.prompt_token_ids,
            sampling_params=message.sampling_params,
            # The last token is sampled but never fed back, so it may be one more than the pool has slots for.
            max_total_tokens=min(
                num_prompt_tokens + message.sampling_params.max_tokens,
                self.max_model_len,
                self.kv_cache.capacity_tokens + 1,
            ),
            rank=build_rank(urgency, self._num_added, is_higher_first=self._is_higher_first),
            arrival_time=message.arrival_time,
            cache_salt=message.cache_salt,
            skip_reading_prefix_cache=message.skip_reading_prefix_cache,
        )
        self._lifecycle.add(request)

    def abort_requests(self, request_ids: Iterable[str]) -> list[EngineCoreOutput]:
        """End requests in any state; unknown and finished ids are ignored.

        Returns:
            The last output of each request that this ended.
        """
        outputs = []
        for request_id in request_ids:
            request = self.requests.get(request_id)
            if request is not None:
                outputs.append(self._lifecycle.finish(request, RequestStatus.FINISHED_ABORTED))
        self._lifecycle.sweep_running()
        return outputs

    def pause(self, state: PauseState) -> None:
        """Leave waiting requests, or all, alone until told otherwise. Results and aborts are applied as ever."""
        self._pause_state = state

    def set_limits(self, limits: SetLimits) -> None:
        """Change what a step may hold, from the next one on. Nobody is preempted for it: what runs, runs on.

        Raises:
            ValueError: It is more than was allocated, or too little to go on with. Nothing has changed.
        """
        self._limits.set(limits)

    def set_draft_token_ids(self, drafts: Mapping[str, Sequence[int]]) -> None:
        """Guess the next tokens of requests, for the model to check in one step.

        Args:
            drafts: By request id. -1 = the runner drafts it itself. Requests that are gone, not running or still have
                prompt to compute are left alone.
        """
        for request_id, token_ids in drafts.items():
            request = self.requests.get(request_id)
            if request is None or request.status is not RequestStatus.RUNNING:
                continue
            num_known = request.num_tokens_with_spec - len(request.draft_token_ids)
            if num_known - request.num_computed_tokens != 1:
                continue
            request.draft_token_ids = list(token_ids)
            request.num_tokens_with_spec = num_known + len(token_ids)
            request.decode_until = 0

    def reset_prefix_cache(self, *, reset_running: bool = False) -> bool:
        """Forget every cached prefix, for example because the weights have changed.

        Args:
            reset_running: Take all blocks from the running requests first; they start again. What steps in flight
                bring for them is thrown away, and sampled again.

        Returns:
            Whether it was done: not while any request owns a block.
        """
        if reset_running:
            dropped = {self._lifecycle.drop_tail().request_id for _ in range(len(self.running))}
            self._counters.num_preempted += len(dropped)
            for step in self._in_flight:
                step.drop(dropped, self._nobody)
        return self.kv_cache.try_reset_prefix_cache()

    # ---------------------------------------------------------------- the step

    def schedule(self, now: float) -> SchedulerOutput:
        """Decide the next step. Nobody gets a token while ``max_steps_in_flight`` results are outstanding.

        Args:
            now: Seconds on the engine's clock.
        """
        is_held = len(self._in_flight) >= self.max_steps_in_flight or self._pause_state is PauseState.PAUSED_ALL
        if is_held:
            plan = StepPlan(now, 0, self._in_flight)
        else:
            plan = self._planner.plan(now, self._in_flight, is_admitting=self._pause_state is PauseState.UNPAUSED)
            self.last_plan = plan
        return self._emit(plan)

    def _emit(self, plan: StepPlan) -> SchedulerOutput:
        self._num_outputs += 1
        output = plan.build_output(
            self._num_outputs, self._lifecycle.take_finished_req_ids(), self._lifecycle.take_preempted_req_ids()
        )
        for constraint in self.constraints:
            constraint.annotate(output, plan)
        if not plan.is_empty:
            self._in_flight.append(plan.build_step(self._num_outputs))
        counters = self._counters
        counters.num_scheduled_tokens += output.total_num_scheduled_tokens
        counters.num_prompt_tokens += output.num_prompt_tokens
        counters.num_drafts += len(output.scheduled_spec_decode_tokens)
        for draft_token_ids in output.scheduled_spec_decode_tokens.values():
            counters.num_draft_tokens += len(draft_token_ids)
        return output

    def update_from_output(self, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> EngineCoreOutputs:
        """Append what the step sampled, and end what has come to its end.

        Args:
            scheduled: What schedule() returned; once each, in order.
            result: What the model runner made of it; empty if there was nothing to run.

        Returns:
            What the clients are to hear. A chunk of a prompt is no news.
        """
        if not scheduled.req_ids:
            return EngineCoreOutputs(self._lifecycle.take_undelivered())
        step = self._in_flight.popleft()
        assert step.step_id == scheduled.step_id, "results are applied in the order of their steps"
        for constraint in self.constraints:
            constraint.end_step(scheduled, result)
        outputs = self._results.apply(step, result)
        num_generation_tokens = len(outputs.token_ids) + sum(len(output.new_token_ids) for output in outputs.outputs)
        self._counters.count_step(scheduled.num_prompt_tokens, num_generation_tokens)
        outputs.started_req_ids.extend(new.request_id for new in scheduled.scheduled_new_reqs if not new.resumed)
        return outputs

    # ------------------------------------------------------------------ figures

    def make_stats(
        self, *, schedule_time_s: float = 0.0, update_time_s: float = 0.0, step_time_s: float = 0.0
    ) -> SchedulerStats:
        """Return the present state, and what has happened since the last call.

        Args:
            schedule_time_s: The caller's measurement; the scheduler has no clock.
            update_time_s: As above.
            step_time_s: As above.
        """
        counters, num_parked = self._counters, len(self.parked)
        stats = SchedulerStats(
            num_running=len(self.running),
            num_waiting=len(self.waiting) + num_parked,
            num_parked=num_parked,
            num_held_back=min(self._lifecycle.num_set_aside, len(self.waiting)),
            num_blocks=self.kv_cache.pool.num_blocks,
            num_free_blocks=self.kv_cache.pool.num_free,
            num_scheduled_tokens=counters.num_scheduled_tokens,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_drafts=counters.num_drafts,
            num_draft_tokens=counters.num_draft_tokens,
            num_accepted_tokens=tuple(counters.num_accepted_tokens),
            num_generation_tokens=counters.num_generation_tokens,
            num_preempted=counters.num_preempted,
            num_prefix_queries=counters.num_prefix_queries,
            num_prefix_hits=counters.num_prefix_hits,
            num_resumed_queries=counters.num_resumed_queries,
            num_resumed_hits=counters.num_resumed_hits,
            num_stalls=counters.num_stalls,
            num_steps=counters.num_steps,
            num_step_prompt_tokens=counters.num_step_prompt_tokens,
            num_step_generation_tokens=counters.num_step_generation_tokens,
            schedule_time_s=schedule_time_s,
            update_time_s=update_time_s,
            step_time_s=step_time_s,
        )
        counters.clear()
        return stats

    def check_invariants(self) -> None:
        """Assert what must hold between any two calls (scheduler.md I1 to I10). Cheap when nothing runs."""
        # Not the live cap: where that was lowered, more may still run.
        most = self._limits.allocated_num_seqs
        check_scheduler(self._lifecycle, self.kv_cache, self._in_flight, max_num_seqs=most)


def _build_nobody() -> Request:
    """Return an ended request: results in flight that are to be dropped go to it."""
    params = SamplingParams(max_tokens=1)
    return Request("", [0], params, max_total_tokens=2, rank=(0, 0), status=RequestStatus.FINISHED_ABORTED)
