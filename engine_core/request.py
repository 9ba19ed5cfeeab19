"""A request as the engine sees it: token ids, counters, a block table. No text, no tensors, no decisions.

The scheduler writes the counters and the status; the KVCacheManager writes the block fields.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from engine_core.messages import FinishReason
from engine_core.sampling_params import SamplingParams

# Smaller is served first and preempted last: (urgency, order of arrival). The last part is unique, so two ranks are
# never equal.
Rank = tuple[int, int]


class RequestStatus(enum.IntEnum):
    """Where a request stands. Everything after PREEMPTED is final."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED_STOPPED = 3
    FINISHED_LENGTH = 4
    FINISHED_ABORTED = 5
    FINISHED_ERROR = 6

    @property
    def is_finished(self) -> bool:
        """True in a state that no event can leave."""
        return self > RequestStatus.PREEMPTED


FINISH_REASONS = {
    RequestStatus.FINISHED_STOPPED: FinishReason.STOP,
    RequestStatus.FINISHED_LENGTH: FinishReason.LENGTH,
    RequestStatus.FINISHED_ABORTED: FinishReason.ABORT,
    RequestStatus.FINISHED_ERROR: FinishReason.ERROR,
}


@dataclass(slots=True, eq=False)
class Request:
    """One request from admission to its last output.

    ``num_computed_tokens`` counts the leading tokens whose KV exists or is scheduled to exist. The law of the
    scheduler: every step lets it catch up with ``num_tokens_with_spec``; there is no prefill and no decode phase::

        all_token_ids   [ prompt ............ | outputs ... ] being sampled | drafts ]
                        0        ^ num_computed_tokens      ^ num_tokens             ^ num_tokens_with_spec

    A token is being sampled from the moment that its step is scheduled until the step's result is applied. Lengths are
    stored, not computed: the hot loops read them many times a step.

    Attributes:
        request_id: Unique among live requests.
        prompt_token_ids: Shared with whoever made them: nobody changes them.
        all_token_ids: Prompt, then outputs. Append only; ``num_tokens`` grows with it.
        num_prompt_tokens: Never changes.
        sampling_params: As the client asked.
        max_total_tokens: Length, prompt included, at which the request ends by length whatever it wants. Its last
            token needs no KV slot.
        min_total_tokens: Length below which no end token ends it.
        rank: Order of service.
        arrival_time: Seconds on the engine's clock.
        cache_salt: Prefixes are shared only among requests of the same salt.
        skip_reading_prefix_cache: It finds nothing in the prefix cache; others find what it computes. True for whoever
            asks for its prompt's logprobs, whatever is given: they are made from the logits of every prompt token.
        status: See RequestStatus.
        num_tokens: ``len(all_token_ids)``.
        num_tokens_with_spec: ``num_tokens``, the tokens being sampled and the drafts.
        num_computed_tokens: See above.
        decode_until: While ``num_computed_tokens`` is below it, each step gives this request exactly one token, with
            no further question: it decodes, without drafts, inside slots that it has. 0 = ask.
        draft_token_ids: Guesses at the tokens after those that are known or being sampled.
        num_steps_to_drain: Of a preempted request: steps in flight whose results for it are still to come.
        num_cached_tokens: Prompt tokens found in the prefix cache when first admitted.
        first_scheduled_time: Seconds on the engine's clock when it was first admitted; None before.
        num_preemptions: Times its blocks were taken away.
        stop_ids: ``sampling_params.end_token_ids``, computed once.
        block_ids: Block table: position ``p`` lives in block ``block_ids[p // block_size]``.
        num_slots: Tokens that the table holds.
        block_digests: Digests of its leading full blocks, extended when needed, kept over preemptions.
        num_registered_blocks: Leading blocks already offered to the prefix index.
        num_reserved_blocks: Blocks its known tokens still lacked when its table last grew.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    max_total_tokens: int
    rank: Rank
    arrival_time: float = 0.0
    cache_salt: str = ""
    skip_reading_prefix_cache: bool = False
    status: RequestStatus = RequestStatus.WAITING
    all_token_ids: list[int] = field(init=False)
    num_prompt_tokens: int = field(init=False)
    min_total_tokens: int = field(init=False)
    num_tokens: int = field(init=False)
    num_tokens_with_spec: int = field(init=False)
    num_computed_tokens: int = 0
    decode_until: int = 0
    draft_token_ids: list[int] = field(default_factory=list)
    num_steps_to_drain: int = 0
    num_cached_tokens: int = 0
    first_scheduled_time: float | None = None
    num_preemptions: int = 0
    stop_ids: frozenset[int] = field(init=False)
    block_ids: list[int] = field(default_factory=list)
    num_slots: int = 0
    block_digests: list[bytes] = field(default_factory=list)
    num_registered_blocks: int = 0
    num_reserved_blocks: int = 0

    def __post_init__(self) -> None:
        self.all_token_ids = list(self.prompt_token_ids)
        self.num_prompt_tokens = self.num_tokens = self.num_tokens_with_spec = len(self.all_token_ids)
        params = self.sampling_params
        self.min_total_tokens = self.num_prompt_tokens + params.min_tokens
        self.skip_reading_prefix_cache |= params.num_prompt_logprobs is not None
        self.stop_ids = params.end_token_ids

    def append_output(self, token_id: int) -> None:
        """Add one sampled token. ``num_tokens_with_spec`` has counted it since it was scheduled."""
        self.all_token_ids.append(token_id)
        self.num_tokens += 1
