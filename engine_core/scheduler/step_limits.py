"""StepLimits: what a step may hold now. Apart from what was allocated, so that it can change while serving."""

from __future__ import annotations

from engine_core.config import SchedulerConfig
from engine_core.messages import SetLimits


class StepLimits:
    """The live caps, read at each step; never above those that the engine was started with.

    Args:
        config: What was allocated, and what holds until told otherwise.
        min_num_batched_tokens: Fewer tokens a step would leave prompts that can never be computed.

    Attributes:
        max_num_seqs: At so many running requests nobody is admitted. If more run, they go on to their ends.
        max_num_batched_tokens: Tokens a step.
        allocated_num_seqs: The most that ``max_num_seqs`` can be.
    """

    def __init__(self, config: SchedulerConfig, *, min_num_batched_tokens: int = 1) -> None:
        self.max_num_seqs = self.allocated_num_seqs = config.max_num_seqs
        self.max_num_batched_tokens = self._allocated_num_batched_tokens = config.max_num_batched_tokens
        self._min_num_batched_tokens = min_num_batched_tokens

    def set(self, wanted: SetLimits) -> None:
        """Take over what is given, all of it or nothing.

        Raises:
            ValueError: A cap lies outside what was allocated, or the two do not fit each other.
        """
        num_seqs = self.max_num_seqs if wanted.max_num_seqs is None else wanted.max_num_seqs
        num_tokens = (
            self.max_num_batched_tokens if wanted.max_num_batched_tokens is None else wanted.max_num_batched_tokens
        )
        for name, value, at_least, at_most in (
            ("max_num_seqs", num_seqs, 1, self.allocated_num_seqs),
            ("max_num_batched_tokens", num_tokens, self._min_num_batched_tokens, self._allocated_num_batched_tokens),
        ):
            if not at_least <= value <= at_most:
                raise ValueError(f"`{name}` may be {at_least} to {at_most} on this server, not {value}.")
        if num_tokens < num_seqs:
            raise ValueError(
                f"`max_num_batched_tokens` ({num_tokens}) would be below `max_num_seqs` ({num_seqs}), and a full batch "
                "of one token each would not fit; raise the first or lower the second."
            )
        self.max_num_seqs, self.max_num_batched_tokens = num_seqs, num_tokens
