"""Figures that the scheduler gives out with every step. Plain numbers; naming them for Prometheus is the server's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """State after a step, and what the step did.

    Attributes:
        num_running: Requests holding KV blocks.
        num_waiting: Requests waiting for admission, preempted ones included.
        num_blocks: Usable KV blocks.
        num_free_blocks: Of those, with no owner.
        num_prompt_tokens: Prompt (and recomputed) tokens scheduled in this step.
        num_generation_tokens: Tokens sampled in this step and delivered.
        num_preempted: Requests preempted in this step.
        num_prefix_queries: Prompt tokens looked up in the prefix cache by first admissions of this step.
        num_prefix_hits: Of those, found.
        step_time_s: From schedule() to the end of update_from_output(); 0 where no step ran.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_prompt_tokens: int = 0
    num_generation_tokens: int = 0
    num_preempted: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    step_time_s: float = 0.0

    @property
    def kv_cache_usage(self) -> float:
        """Share of usable blocks that have an owner, 0..1."""
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0
