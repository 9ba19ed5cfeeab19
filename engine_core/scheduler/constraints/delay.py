"""Delay factor: new prompts are held back for a while, so that running requests keep their pace."""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.request import Request, RequestStatus
from engine_core.scheduler.constraint import Constraint, Verdict
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.scheduler.step_plan import StepPlan


class DelayFactor(Constraint):
    """While others run, a new request waits ``factor`` times as long as the last step with prompt tokens took.

    Once the head of the queue has waited long enough, the step admits like any other. A preempted request is never
    held back: it has waited already.

    Args:
        factor: Above 0.

    Source: scheduler.md B7.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        self._last_prompt_step_s = 0.0
        self._is_open = True

    def begin_step(self, plan: StepPlan, running: Sequence[Request]) -> None:
        """With nothing running, nobody's pace is to be kept."""
        self._is_open = not running

    def gate(self, request: Request, plan: StepPlan) -> Verdict:
        """Stop at a head that has not waited long enough."""
        if self._is_open or request.status is RequestStatus.PREEMPTED:
            return Verdict.ADMIT
        if plan.now - request.arrival_time <= self._factor * self._last_prompt_step_s:
            return Verdict.STOP
        self._is_open = True
        return Verdict.ADMIT

    def end_step(self, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Remember how long prompts take."""
        if scheduled.num_prompt_tokens:
            self._last_prompt_step_s = result.execute_time_s
