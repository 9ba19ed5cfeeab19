"""Constraint: the one seam through which a feature shapes a step.

A constraint can only hold back, never add, so any set of them leaves the scheduler's own guarantees intact. A feature
that is off is absent from the list, and schedule() has no branch for it.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence

from engine_core.request import Request
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.scheduler.step_plan import StepPlan


class Verdict(enum.Enum):
    """What to do with the request at the head of the queue."""

    ADMIT = enum.auto()
    SKIP = enum.auto()  # not in this step; it keeps its place, and the next one is looked at
    STOP = enum.auto()  # not in this step, nor anything behind it


class Constraint:
    """A feature's say in a step. A feature overrides the two or three hooks that it needs.

    Attributes:
        touches_decode: Whether ``cap`` and ``commit`` must also hear of plain decodes: requests that get the one token
            that their last sample asks for. Where no constraint cares, those take the short lane.
    """

    touches_decode = True

    def overrides(self, hook: str) -> bool:
        """Tell whether this feature has its own version of a hook."""
        return getattr(type(self), hook) is not getattr(Constraint, hook)

    def begin_step(self, plan: StepPlan, running: Sequence[Request]) -> None:
        """Reset what is counted per step."""

    def gate(self, request: Request, plan: StepPlan) -> Verdict:
        """May this waiting request be admitted in this step? May be asked twice in a step. With nothing running and no
        step in flight, STOP ends it with an error."""
        return Verdict.ADMIT

    def cap(self, request: Request, num_computed_tokens: int, num_new_tokens: int, plan: StepPlan) -> int:
        """Return how many of ``num_new_tokens`` (at least 1) it may have. 0: a running request sits this step out, a
        waiting one stops admission."""
        return num_new_tokens

    def commit(self, request: Request, num_computed_tokens: int, num_new_tokens: int, plan: StepPlan) -> None:
        """The request has got its tokens and their slots: charge your own budget."""

    def release(self, request: Request) -> None:
        """The request has lost its blocks or ended: drop what you hold for it."""

    def annotate(self, output: SchedulerOutput, plan: StepPlan) -> None:
        """Write your part of the output for the model runner."""

    def end_step(self, scheduled: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """The step's result is in, and about to be applied: learn what it took."""
