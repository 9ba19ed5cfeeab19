"""StepCounters: what has happened since the last SchedulerStats. Counts once a step or once an event, never once a row
of a plain decode; decides nothing."""

from __future__ import annotations


class StepCounters:
    """Running sums; SchedulerStats says what each means."""

    __slots__ = (
        "num_accepted_tokens",
        "num_draft_tokens",
        "num_drafts",
        "num_generation_tokens",
        "num_preempted",
        "num_prefix_hits",
        "num_prefix_queries",
        "num_prompt_tokens",
        "num_resumed_hits",
        "num_resumed_queries",
        "num_scheduled_tokens",
        "num_stalls",
        "num_step_generation_tokens",
        "num_step_prompt_tokens",
        "num_steps",
    )

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Start again from zero."""
        self.num_scheduled_tokens = 0
        self.num_prompt_tokens = 0
        self.num_drafts = 0
        self.num_draft_tokens = 0
        self.num_generation_tokens = 0
        self.num_preempted = 0
        self.num_prefix_queries = 0
        self.num_prefix_hits = 0
        self.num_resumed_queries = 0
        self.num_resumed_hits = 0
        self.num_stalls = 0
        self.num_steps = 0
        self.num_step_prompt_tokens = 0
        self.num_step_generation_tokens = 0
        self.num_accepted_tokens: list[int] = []

    def count_lookup(self, num_tokens: int, num_hits: int, *, is_resumed: bool) -> None:
        """Count an admission's lookup. A resumed request that finds its own blocks again is no hit."""
        if is_resumed:
            self.num_resumed_queries += num_tokens
            self.num_resumed_hits += num_hits
        else:
            self.num_prefix_queries += num_tokens
            self.num_prefix_hits += num_hits

    def count_step(self, num_prompt_tokens: int, num_generation_tokens: int) -> None:
        """Count a step whose results are in."""
        self.num_steps += 1
        self.num_step_prompt_tokens += num_prompt_tokens
        self.num_step_generation_tokens += num_generation_tokens
        self.num_generation_tokens += num_generation_tokens

    def count_accepted(self, num_accepted: int) -> None:
        """Count a row's accepted drafts by position."""
        counts = self.num_accepted_tokens
        counts += [0] * (num_accepted - len(counts))
        for position in range(num_accepted):
            counts[position] += 1
