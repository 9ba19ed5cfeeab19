"""Static batching, for comparison only: what continuous batching replaces, as one Constraint."""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.request import Request
from engine_core.scheduler.constraint import Constraint, Verdict
from engine_core.scheduler.output import SchedulerOutput
from engine_core.scheduler.step_plan import StepPlan


class StaticBatching(Constraint):
    """A batch is filled from the queue, then nobody is admitted until its last member has ended.

    It stays open over several steps only where the prompts take more than one step's tokens: once a step leaves
    tokens over, the queue was empty or the batch full. It does not wait for more requests to come.

    Args:
        max_num_seqs: Size of a batch.
    """

    touches_decode = False

    def __init__(self, max_num_seqs: int) -> None:
        self._max_num_seqs = max_num_seqs
        self._is_open = True

    def begin_step(self, plan: StepPlan, running: Sequence[Request]) -> None:
        """The last one out opens the next batch."""
        if not running:
            self._is_open = True

    def gate(self, request: Request, plan: StepPlan) -> Verdict:
        """Stop at a closed batch."""
        return Verdict.ADMIT if self._is_open else Verdict.STOP

    def annotate(self, output: SchedulerOutput, plan: StepPlan) -> None:
        """Close the batch behind the last one who found a place."""
        if plan.token_budget > 0 or plan.num_rows >= self._max_num_seqs:
            self._is_open = False
