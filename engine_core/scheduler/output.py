"""SchedulerOutput: the whole contract between the scheduler and the model runner, one a step.

A delta, in columns: the runner keeps each request's state by row and applies what changed.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """A request entering the running set, for the first time or again after a preemption.

    Attributes:
        request_id: Whose.
        token_ids: All known tokens: the prompt, and for a resumed request its outputs too.
        num_prompt_tokens: How many of them are prompt.
        sampling_params: For the sampler.
        block_ids: Its whole block table; replaces any earlier one.
        num_computed_tokens: Leading tokens whose KV exists (prefix-cache hits).
        resumed: True after a preemption.
    """

    request_id: str
    token_ids: list[int]
    num_prompt_tokens: int
    sampling_params: SamplingParams
    block_ids: list[int]
    num_computed_tokens: int
    resumed: bool = False


@dataclass(slots=True)
class CachedRequestData:
    """Requests that ran before, in columns of equal length.

    Attributes:
        req_ids: Whose.
        new_block_ids: Blocks to append to each table; often empty.
        num_computed_tokens: Position of each one's first token of this step.
    """

    req_ids: list[str] = field(default_factory=list)
    new_block_ids: list[list[int]] = field(default_factory=list)
    num_computed_tokens: list[int] = field(default_factory=list)


@dataclass(slots=True)
class SchedulerOutput:
    """What the next forward step computes. Immutable for the scheduler once returned.

    Attributes:
        num_scheduled_tokens: Tokens of each request in this step, in schedule order.
        total_num_scheduled_tokens: Their sum; 0 = nothing to execute, only news to apply.
        scheduled_new_reqs: Entering, with their whole state.
        scheduled_cached_reqs: Going on, with what changed.
        finished_req_ids: Ended since the last output, each reported once, before any reuse of its state.
        preempted_req_ids: Preempted while this output was made.
        num_common_prefix_blocks: Leading blocks shared by every scheduled request.
    """

    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    finished_req_ids: list[str]
    preempted_req_ids: list[str]
    num_common_prefix_blocks: int = 0


@dataclass(slots=True)
class ModelRunnerOutput:
    """What a step brought back.

    Attributes:
        sampled_token_ids: Per request that reached its last known token; a prompt chunk samples nothing and is absent.
        errors: Requests whose own computation failed (non-finite logits), with a sentence each.
    """

    sampled_token_ids: dict[str, list[int]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
