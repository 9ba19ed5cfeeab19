"""What passes between admission, the engine client and the routes, once a wire request has been accepted."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine_core import EngineCoreRequest, FinishReason
from server.stop_strings import StopStrings


class ServerStoppingError(Exception):
    """The server was told to stop; the message says so to the client."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to be continued once.

    Attributes:
        engine_request: What the engine gets.
        stop_strings: What ends the text and is never shown. Shared by the prompts of one wire request: fork it.
    """

    engine_request: EngineCoreRequest
    stop_strings: StopStrings = field(default_factory=lambda: StopStrings(()))

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.engine_request.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class GenerationOutput:
    """What has come since the last one.

    Attributes:
        text: New text, complete characters only; concatenated over a request it is the whole answer.
        num_output_tokens: Tokens sampled so far, the stopping one included.
        finish_reason: Set on the last one only.
        stop_reason: The stop string or stop token id that ended it, else None.
        num_cached_tokens: Prompt tokens served from the prefix cache.
        error: A sentence where ``finish_reason`` is ERROR.
    """

    text: str
    num_output_tokens: int
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    error: str | None = None
