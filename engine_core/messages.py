"""What crosses the line between the server's thread and the engine's. Frozen, and free of text and tensors."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from engine_core.errors import EngineFailure
from engine_core.sampling_params import SamplingParams
from engine_core.stats import SchedulerStats


class FinishReason(enum.StrEnum):
    """Why a request ended; the value is what the HTTP API calls it."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class EngineCoreRequest:
    """One admitted request. Everything that could be refused has been refused before this exists.

    Attributes:
        request_id: Unique among live requests; made by the server, never by a client.
        prompt_token_ids: At least one id, each in the model's vocabulary.
        sampling_params: How to pick tokens and when to stop.
        arrival_time: Seconds on the engine's clock (monotonic).
        priority: Read under the priority policy only; which end is urgent is configured. 0 = ordinary.
        cache_salt: Prefixes are shared only among requests of the same salt.
        skip_reading_prefix_cache: Compute the whole prompt; others may still find it. Needless where the prompt's
            logprobs are asked for: that says it already.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    arrival_time: float
    priority: int = 0
    cache_salt: str = ""
    skip_reading_prefix_cache: bool = False


@dataclass(frozen=True, slots=True)
class AbortRequest:
    """End these requests, wherever they are. Unknown and finished ids are ignored."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SetLimits:
    """Let steps hold so much from the next one on; never more than the engine was started with. None = as it is.

    Attributes:
        max_num_seqs: Requests running at once. If more run, they go on to their ends, and nobody is admitted meanwhile.
        max_num_batched_tokens: Tokens a step.
    """

    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Forget every cached prefix; not done while any request owns a block.

    Attributes:
        reset_running: Take all blocks from the running requests first; they are computed again.
    """

    reset_running: bool = False


# What is carried out between two steps and answered: done, or not.
EngineCommand = SetLimits | ResetPrefixCache


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model itself found one token, before anything that a request asks for bends its logits.

    Attributes:
        token_id: Which.
        logprob: Natural logarithm of its probability.
        rank: 1 = no token is likelier.
        top_token_ids: The likeliest tokens, likeliest first.
        top_logprobs: Theirs.
    """

    token_id: int
    logprob: float
    rank: int
    top_token_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineCoreOutput:
    """What one step brought for one request.

    Attributes:
        request_id: Whose.
        new_token_ids: Sampled in this step, the stopping token included. May be empty on abort and error.
        finish_reason: Set exactly once per request, on its last output.
        stop_token_id: The ``stop_token_ids`` entry that ended it, None where an EOS did or nothing stopped it.
        num_cached_tokens: Prompt tokens served from the prefix cache.
        error: A sentence, with ``finish_reason`` ERROR only.
        first_scheduled_time: Seconds on the engine's clock when it was first admitted; with first token and end.
        logprobs: One per new token, where the request asked for them.
        prompt_logprobs: Of the prompt from its second token on, with the first token, where the request asked.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    first_scheduled_time: float | None = None
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None


@dataclass(frozen=True, slots=True)
class EngineCoreOutputs:
    """All that one step has to tell: one message a step, whatever the batch.

    A request that got one more token and goes on, the case of nearly every row of nearly every step, is a line of two
    columns; everything else (a first token, several tokens, an end) is a record. No request is in both.

    Attributes:
        outputs: Records, one per request that has one.
        token_req_ids: Column: who got exactly one token, not the first, and goes on.
        token_ids: Column: that token, of the same length.
        stats: The scheduler's figures after the step.
        engine_error: Set once, on the engine's last message: why it died. Every live request ends with it.
        preemptions: Who has lost their blocks since the last such message, each with the time of the step that was
            scheduled so, in seconds on the engine's clock. Never behind the request's end, which a step in flight may
            bring.
        started_req_ids: Requests that the step admitted for the first time, whether or not they have a token yet.
    """

    outputs: list[EngineCoreOutput]
    stats: SchedulerStats | None = None
    engine_error: str | None = None
    token_req_ids: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    preemptions: list[tuple[str, float]] = field(default_factory=list)
    started_req_ids: list[str] = field(default_factory=list)

    def as_records(self) -> list[EngineCoreOutput]:
        """View: the lines of the columns as records too. For those who are not in a hurry."""
        lines = zip(self.token_req_ids, self.token_ids, strict=True)
        return [*(EngineCoreOutput(request_id, [token_id]) for request_id, token_id in lines), *self.outputs]


class EnginePhase(enum.StrEnum):
    """Where the engine stands. Moves forward only."""

    LOADING = "loading"
    READY = "ready"
    STOPPED = "stopped"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class EngineState:
    """A snapshot of the engine as other threads may see it; replaced whole, never changed.

    Attributes:
        phase: See EnginePhase.
        detail: A few words: what is being loaded, or why it died.
        progress: Of loading, 0..1.
        num_blocks: Usable KV blocks; 0 until loaded.
        block_size: Tokens a block.
        max_model_len: Effective context in tokens; 0 until loaded.
        weights_bytes: Memory that the weights take, as loaded; 0 until loaded.
        kv_bytes: Memory that the KV blocks take; 0 until loaded.
        failure: What it died of; None while it lives.
    """

    phase: EnginePhase
    detail: str = ""
    progress: float = 0.0
    num_blocks: int = 0
    block_size: int = 0
    max_model_len: int = 0
    weights_bytes: int = 0
    kv_bytes: int = 0
    failure: EngineFailure | None = None
