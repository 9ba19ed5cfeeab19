"""How a prompt may be cut over steps: not at all, or in pieces of a limited size."""

from __future__ import annotations

from engine_core.request import Request
from engine_core.scheduler.constraint import Constraint
from engine_core.scheduler.step_plan import StepPlan


class WholePrompt(Constraint):
    """Chunked prefill off: a request gets all its known tokens in one step, or none (scheduler.md A3)."""

    touches_decode = False

    def cap(self, request: Request, num_computed_tokens: int, num_new_tokens: int, plan: StepPlan) -> int:
        """All or nothing."""
        return num_new_tokens if num_computed_tokens + num_new_tokens >= request.num_tokens else 0


class ChunkLimit(Constraint):
    """No request gets more than ``max_tokens`` tokens a step, so that one long prompt does not fill it (B3).

    Args:
        max_tokens: At least 1.
    """

    touches_decode = False

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens

    def cap(self, request: Request, num_computed_tokens: int, num_new_tokens: int, plan: StepPlan) -> int:
        """Cut to the limit."""
        return min(num_new_tokens, self.max_tokens)
