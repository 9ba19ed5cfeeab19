"""What one request got: its events with their times, its counts, or why it failed. Pure: time comes in."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import Any

_MAX_ERROR_CHARS = 400
_DONE = b"[DONE]"
# An event with this in it holds one more token, and nothing else that is wanted: not worth 5 us of parsing JSON.
# Inside a string the quotes would be escaped.
_PLAIN_MARKS = (b'"finish_reason":null', b'"finish_reason": null')
_ERROR_MARK = b'"error"'
_USAGE_MARK = b'"prompt_tokens"'


@dataclass(slots=True, kw_only=True)
class RequestResult:
    """One request's answer. All times are of the same clock, in seconds.

    Attributes:
        start_s: When it was due: what the connection took counts.
        token_times: When each event with text came. Several tokens may share one.
        end_s: When the answer was complete, or failed.
        num_prompt_tokens: As the server counts; None = it does not say.
        num_cached_tokens: Of those, taken from its prefix cache; None as above.
        num_output_tokens: As the server counts, else the number of events.
        has_usage: The server has counted.
        error: One sentence; None = a complete answer.
    """

    start_s: float
    token_times: list[float] = field(default_factory=list)
    end_s: float = 0.0
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_output_tokens: int = 0
    has_usage: bool = False
    error: str | None = None

    @property
    def ttft_s(self) -> float:
        """From when it was due to its first token; there must be one."""
        return self.token_times[0] - self.start_s

    @property
    def e2e_s(self) -> float:
        """From when it was due to its last token; there must be one."""
        return self.token_times[-1] - self.start_s

    @property
    def gaps_s(self) -> list[float]:
        """Between one event and the next."""
        return [later - earlier for earlier, later in itertools.pairwise(self.token_times)]

    @property
    def time_per_token_s(self) -> float:
        """The mean gap: from the first token to the last, by the tokens after the first; 0 of a single token."""
        if self.num_output_tokens < 2:
            return 0.0
        return (self.token_times[-1] - self.token_times[0]) / (self.num_output_tokens - 1)


class AnswerTally:
    """Counts one answer's events.

    Args:
        result: Is filled.

    Attributes:
        is_done: The stream has ended as it should, or with an error event.
    """

    def __init__(self, result: RequestResult) -> None:
        self.is_done = False
        self._result = result

    def take(self, data: bytes, now_s: float) -> None:
        """Count one event.

        Args:
            data: Of the event.
            now_s: When it came.
        """
        result = self._result
        if any(mark in data for mark in _PLAIN_MARKS) and _ERROR_MARK not in data and _USAGE_MARK not in data:
            result.token_times.append(now_s)
        elif data == _DONE:
            self.is_done = True
        else:
            self._take_parsed(data, now_s)
        if not result.has_usage:
            result.num_output_tokens = len(result.token_times)

    def _take_parsed(self, data: bytes, now_s: float) -> None:
        try:
            event = json.loads(data)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            self._fail(f"an event is no JSON object: {data[:80]!r}")
            return
        if event.get("error"):
            self._fail(f"the stream holds an error: {find_message(event)}")
            return
        self._take_usage(event.get("usage"))
        choices = event.get("choices")
        if choices and (choices[0].get("text") or not choices[0].get("finish_reason")):
            self._result.token_times.append(now_s)

    def _take_usage(self, usage: Any) -> None:
        if not isinstance(usage, dict) or not isinstance(usage.get("completion_tokens"), int):
            return
        result = self._result
        result.has_usage = True
        result.num_output_tokens = usage["completion_tokens"]
        result.num_prompt_tokens = usage.get("prompt_tokens")
        result.num_cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")

    def _fail(self, error: str) -> None:
        self._result.error = error
        self.is_done = True


def describe_refusal(status: int, body: bytes) -> str:
    """Return what a server said instead of an answer, as one sentence.

    Args:
        status: Not 200.
        body: JSON or not, possibly cut.
    """
    try:
        said = find_message(json.loads(body))
    except ValueError:
        said = body.decode("utf-8", "replace")
    said = " ".join(said.split())[:_MAX_ERROR_CHARS]
    return f"the server answered {status}" + (f": {said}" if said else "")


def find_message(value: Any) -> str:
    """Return the message in an error's JSON, whichever of the usual shapes it has."""
    if isinstance(value, dict):
        for key in ("error", "message", "detail"):
            if value.get(key):
                return find_message(value[key])
    return value if isinstance(value, str) else json.dumps(value)
