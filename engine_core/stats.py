"""Figures that the scheduler gives out with every step. Plain numbers; naming them for Prometheus is the server's."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """State after a step, and what has happened since the stats before.

    Attributes:
        num_running: Requests holding KV blocks.
        num_waiting: Requests without, preempted and parked ones included.
        num_parked: Of those, preempted ones whose last output is still under way: not to be admitted before it is in.
        num_held_back: Of those, ones that a constraint set aside when the queue was last looked at.
        num_blocks: Usable KV blocks.
        num_free_blocks: Of those, with no owner.
        num_scheduled_tokens: Tokens handed out: prompt, output and draft tokens together.
        num_prompt_tokens: Of those, known tokens computed in bulk: prompts, and what a preemption threw away.
        num_drafts: Times that a request got drafts to check.
        num_draft_tokens: Of num_scheduled_tokens, drafts.
        num_accepted_tokens: Drafts that the model agreed with, by position: entry i counts the (i+1)-th drafts.
        num_generation_tokens: Tokens sampled and delivered.
        num_preempted: Preemptions.
        num_prefix_queries: Prompt tokens looked up in the prefix cache by first admissions.
        num_prefix_hits: Of those, found.
        num_resumed_queries: Tokens looked up by admissions after a preemption.
        num_resumed_hits: Of those, found: what a preemption did not cost.
        num_stalls: Steps that gave nobody a token although somebody was running.
        schedule_time_s: Time inside schedule().
        update_time_s: Time inside update_from_output().
        num_steps: Steps whose results were applied: 1, or 0 where the news came without a step.
        num_step_prompt_tokens: What those steps computed of num_prompt_tokens; a step scheduled ahead is not yet in it.
        num_step_generation_tokens: What those steps brought of num_generation_tokens.
        step_time_s: From schedule() to the end of update_from_output(); 0 where no step ran.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_parked: int = 0
    num_held_back: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0
    num_scheduled_tokens: int = 0
    num_prompt_tokens: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: tuple[int, ...] = ()
    num_generation_tokens: int = 0
    num_preempted: int = 0
    num_prefix_queries: int = 0
    num_prefix_hits: int = 0
    num_resumed_queries: int = 0
    num_resumed_hits: int = 0
    num_stalls: int = 0
    num_steps: int = 0
    num_step_prompt_tokens: int = 0
    num_step_generation_tokens: int = 0
    schedule_time_s: float = 0.0
    update_time_s: float = 0.0
    step_time_s: float = 0.0

    @property
    def kv_cache_usage(self) -> float:
        """Share of usable blocks that have an owner, 0..1."""
        return 1.0 - self.num_free_blocks / self.num_blocks if self.num_blocks else 0.0
