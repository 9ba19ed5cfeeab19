"""What passes between admission, the engine client and the routes, once a wire request has been accepted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from engine_core import EngineCoreRequest, FinishReason, TokenLogprobs
from server.records import RequestRecord
from server.stop_strings import StopStrings

# Where clients ask for generations. A request that is refused before it meets a route is told by its path.
GENERATING_PATHS = ("/v1/chat/completions", "/v1/completions")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the engine gets it and as a client may want it back.

    Attributes:
        token_ids: At least one.
        text: What was sent, or what the ids say; None where nobody needs it.
        offsets: Per token: characters of ``text`` before it; empty where nobody needs them.
    """

    token_ids: list[int]
    text: str | None = None
    offsets: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to be continued once.

    Attributes:
        engine_request: What the engine gets.
        prompt: Its prompt.
        stop_strings: What ends the text. Shared by the choices of one wire request: fork it.
        shows_stop: What ended the text is part of it.
        is_prompt_only: Nothing is generated for the client (max_tokens 0); the engine cannot but sample one token.
        n: How many choices its prompt has; each is a request.
        choice: Which of them it is, from 0.
        key_id: Whose key it came with; empty where no key is asked for.
        record: Its figures, which the output processor writes as they come.
    """

    engine_request: EngineCoreRequest
    prompt: Prompt
    stop_strings: StopStrings = field(default_factory=lambda: StopStrings(()))
    shows_stop: bool = False
    is_prompt_only: bool = False
    n: int = 1
    choice: int = 0
    record: RequestRecord = field(init=False, compare=False, repr=False)
    key_id: str = ""

    def __post_init__(self) -> None:
        record = RequestRecord(
            request_id=self.engine_request.request_id,
            arrival_time=self.engine_request.arrival_time,
            num_prompt_tokens=self.num_prompt_tokens,
            max_tokens=0 if self.is_prompt_only else self.engine_request.sampling_params.max_tokens,
            n=self.n,
            choice=self.choice,
            key_id=self.key_id,
        )
        object.__setattr__(self, "record", record)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.engine_request.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class LikelyToken:
    """One of the likeliest tokens at some place.

    Attributes:
        token_id: Which.
        data: The bytes that it stands for; they may be a part of a character.
        logprob: Natural logarithm of its probability.
    """

    token_id: int
    data: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenText:
    """One token of the prompt or of the output, with its logprobs.

    Attributes:
        token_id: Which.
        data: The bytes that it stands for.
        offset: Complete characters of its text (the prompt's, or the output's) before it.
        logprob: None for the first token of a prompt, which nothing predicts.
        rank: 1 = no token is likelier there; None likewise.
        top: The likeliest tokens there, likeliest first.
    """

    token_id: int
    data: bytes
    offset: int
    logprob: float | None = None
    rank: int | None = None
    top: tuple[LikelyToken, ...] = ()


class GenerationOutput(NamedTuple):
    """What has come since the last one. A tuple: there is one a token, and a frozen dataclass takes thrice as long.

    Attributes:
        text: New text, complete characters only; concatenated over a request it is the whole answer.
        num_output_tokens: Tokens sampled so far, the stopping one included.
        finish_reason: Set on the last one only.
        stop_reason: The stop string or stop token id that ended it, else None.
        num_cached_tokens: Prompt tokens served from the prefix cache.
        error: A sentence where ``finish_reason`` is ERROR.
        tokens: The tokens of the text shown so far that no earlier output brought; only where logprobs were asked for.
        prompt_logprobs: The prompt's, from its second token on, in one output; only where they were asked for.
    """

    text: str
    num_output_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    tokens: tuple[TokenText, ...] = ()
    prompt_logprobs: Sequence[TokenLogprobs] | None = None
