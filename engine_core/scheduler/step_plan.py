"""StepPlan: the scratch pad of one schedule() call. Born and dropped inside it; decides nothing."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_core.request import Request, RequestStatus
from engine_core.scheduler.output import CachedRequestData, NewRequestData, SchedulerOutput


@dataclass(slots=True)
class StepPlan:
    """What the step under construction holds so far.

    Attributes:
        now: Seconds on the engine's clock.
        token_budget: Tokens that may still be scheduled.
        scheduled: Each request of the step with its number of tokens, in schedule order.
        preempted: Requests that lost their blocks in this step.
    """

    now: float
    token_budget: int
    scheduled: list[tuple[Request, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    _new: list[NewRequestData] = field(default_factory=list)
    _cached: CachedRequestData = field(default_factory=CachedRequestData)

    def add_running(self, request: Request, num_new_tokens: int, block_ids: list[int]) -> None:
        """Record a request that the model runner knows."""
        self._charge(request, num_new_tokens)
        self._cached.req_ids.append(request.request_id)
        self._cached.new_block_ids.append(block_ids)
        self._cached.num_computed_tokens.append(request.num_computed_tokens)

    def add_admitted(self, request: Request, num_new_tokens: int) -> None:
        """Record a request that enters, or re-enters, with all its state; its status still tells which."""
        self._charge(request, num_new_tokens)
        self._new.append(
            NewRequestData(
                request_id=request.request_id,
                token_ids=request.all_token_ids.copy(),
                num_prompt_tokens=request.num_prompt_tokens,
                sampling_params=request.sampling_params,
                block_ids=request.block_ids.copy(),
                num_computed_tokens=request.num_computed_tokens,
                resumed=request.status is RequestStatus.PREEMPTED,
            )
        )

    def build_output(self, finished_req_ids: list[str]) -> SchedulerOutput:
        """Pack the plan into what the model runner gets."""
        return SchedulerOutput(
            num_scheduled_tokens={request.request_id: num for request, num in self.scheduled},
            total_num_scheduled_tokens=sum(num for _, num in self.scheduled),
            scheduled_new_reqs=self._new,
            scheduled_cached_reqs=self._cached,
            finished_req_ids=finished_req_ids,
            preempted_req_ids=[request.request_id for request in self.preempted],
        )

    def _charge(self, request: Request, num_new_tokens: int) -> None:
        self.scheduled.append((request, num_new_tokens))
        self.token_budget -= num_new_tokens
