"""Limits: what the server takes on. Frozen; a change while serving puts another object in its place."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the server takes on; 0 = no limit. The first four can change while serving.

    Attributes:
        max_num_seqs: Requests that the engine runs at once; 0 = unknown, hence nobody is taken for seated.
        max_num_batched_tokens: Tokens of one of its steps.
        max_queued_requests: Requests, one a choice, that wait for the engine beyond those it has a seat for.
        max_queued_tokens: Their prompt tokens.
        queue_timeout_s: A request that has not been started after so long is given up.
        request_timeout_s: A request that has not ended after so long is given up.
        max_requests_per_key: Requests that one key may have in hand at once.
        max_requests_per_minute: Requests that one key may send a minute, so many of them at once.
    """

    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    max_queued_requests: int = 0
    max_queued_tokens: int = 0
    queue_timeout_s: float = 0.0
    request_timeout_s: float = 0.0
    max_requests_per_key: int = 0
    max_requests_per_minute: int = 0
