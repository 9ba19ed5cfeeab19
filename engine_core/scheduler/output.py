"""SchedulerOutput: the whole contract between the scheduler and the model runner, one a step.

A delta, in columns: the runner keeps each request's state by id and applies what changed. The views by id are built
when asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from engine_core.messages import TokenLogprobs
from engine_core.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class NewRequestData:
    """A request entering the running set, for the first time or again after a preemption.

    Attributes:
        request_id: Whose.
        token_ids: All known tokens: the prompt, and for a resumed request its outputs too. Nobody changes them.
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


@dataclass(frozen=True, slots=True)
class CachedRequestData:
    """Requests that ran before, in columns of equal length.

    Attributes:
        req_ids: Whose.
        new_block_ids: Blocks to append to each table; often empty.
        num_computed_tokens: Position of each one's first token of this step; see SchedulerOutput.starts.
    """

    req_ids: list[str]
    new_block_ids: list[list[int]]
    num_computed_tokens: list[int]


@dataclass(slots=True)
class SchedulerOutput:
    """What the next forward step computes. The scheduler does not touch it any more once it is returned.

    Three columns, one line per scheduled request: first those that decode one token, then the rest, each part in the
    order of service.

    Attributes:
        step_id: Counts the outputs, from 1.
        req_ids: Whose line it is.
        token_counts: Tokens to compute, at least 1.
        starts: Position of the first of them: the tokens before it have their KV, in this step's order of execution.
            With drafts in flight it is an upper bound: the runner subtracts the rejections that it has seen itself.
        new_block_ids: Blocks to append to the tables of requests that ran before, for those whose table grows.
        scheduled_new_reqs: Those that enter, with their whole state.
        scheduled_spec_decode_tokens: Drafts among the scheduled tokens, for those that have any. -1 = the runner
            drafts it itself.
        finished_req_ids: Ended since the last output, each reported once, before any reuse of its state.
        preempted_req_ids: Lost their blocks since the last output.
        num_common_prefix_blocks: Leading blocks shared by, and computed for, every scheduled request.
        num_prompt_tokens: Scheduled tokens that are prompts, or what a preemption threw away.
    """

    step_id: int = 0
    req_ids: list[str] = field(default_factory=list)
    token_counts: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    new_block_ids: dict[str, list[int]] = field(default_factory=dict)
    scheduled_new_reqs: list[NewRequestData] = field(default_factory=list)
    scheduled_spec_decode_tokens: dict[str, list[int]] = field(default_factory=dict)
    finished_req_ids: list[str] = field(default_factory=list)
    preempted_req_ids: list[str] = field(default_factory=list)
    num_common_prefix_blocks: int = 0
    num_prompt_tokens: int = 0
    total_num_scheduled_tokens: int = 0

    @property
    def has_news(self) -> bool:
        """Whether the runner must see it: work, or requests that left."""
        return bool(self.req_ids or self.finished_req_ids or self.preempted_req_ids)

    @property
    def num_scheduled_tokens(self) -> dict[str, int]:
        """View: tokens by request id."""
        return dict(zip(self.req_ids, self.token_counts, strict=True))

    @property
    def scheduled_cached_reqs(self) -> CachedRequestData:
        """View: the lines of requests that ran before."""
        entering = {new.request_id for new in self.scheduled_new_reqs}
        lines = [
            (request_id, start)
            for request_id, start in zip(self.req_ids, self.starts, strict=True)
            if request_id not in entering
        ]
        return CachedRequestData(
            req_ids=[request_id for request_id, _ in lines],
            new_block_ids=[self.new_block_ids.get(request_id, []) for request_id, _ in lines],
            num_computed_tokens=[start for _, start in lines],
        )


@dataclass(slots=True)
class ModelRunnerOutput:
    """What a step brought back.

    Attributes:
        token_ids: A column beside SchedulerOutput.req_ids: the token sampled for each, -1 where none was due (a chunk
            of a prompt that ends before the last known token) or its computation failed. Empty for an empty step.
        more_token_ids: Tokens after that one, for requests whose drafts were accepted.
        errors: Requests whose own computation failed (non-finite logits), with a sentence each.
        logprobs: One per sampled token, for requests that asked for them.
        prompt_logprobs: Of the prompt from its second token on, for requests that asked, in the step that computed
            the prompt's last token.
        execute_time_s: Seconds that the runner took; 0 where nobody measured.
    """

    token_ids: list[int] = field(default_factory=list)
    more_token_ids: dict[str, list[int]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    prompt_logprobs: dict[str, list[TokenLogprobs]] = field(default_factory=dict)
    execute_time_s: float = 0.0

    @classmethod
    def of(cls, scheduled: SchedulerOutput, sampled: Mapping[str, list[int]]) -> ModelRunnerOutput:
        """Build it from all tokens of each request that sampled."""
        return cls(
            token_ids=[sampled[request_id][0] if sampled.get(request_id) else -1 for request_id in scheduled.req_ids],
            more_token_ids={request_id: tokens[1:] for request_id, tokens in sampled.items() if len(tokens) > 1},
        )

    def sampled_token_ids(self, scheduled: SchedulerOutput) -> Iterator[tuple[str, list[int]]]:
        """View: each request that sampled, with all its tokens."""
        for request_id, token_id in zip(scheduled.req_ids, self.token_ids, strict=True):
            if token_id >= 0:
                yield request_id, [token_id, *self.more_token_ids.get(request_id, ())]
