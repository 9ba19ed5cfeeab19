"""What those are told who are not let in, or have waited too long; and what metrics call the reason. Pure."""

from __future__ import annotations

import enum

from server.errors import ErrorKind, RequestError


class Reason(enum.StrEnum):
    """Why a request was refused or given up; a label of vllm:admission_rejections_total."""

    QUEUE_FULL = "queue_full"
    QUEUE_TOKENS_FULL = "queue_tokens_full"
    QUEUE_TIMEOUT = "queue_timeout"
    REQUEST_TIMEOUT = "request_timeout"
    KEY_CONCURRENCY = "key_concurrency"
    KEY_RATE = "key_rate"


class Refusal(RequestError):
    """A request that was refused or given up for overload.

    Attributes:
        reason: Why.
    """

    def __init__(self, message: str, *, reason: Reason, kind: ErrorKind, retry_after_s: int | None = None) -> None:
        super().__init__(message, kind=kind, retry_after_s=retry_after_s)
        self.reason = reason


def build_queue_full(num_queued: int, cap: int, retry_after_s: int) -> Refusal:
    """Return the 503 for a queue that holds as many requests as it may."""
    return Refusal(
        f"The server is full: {num_queued} {'request waits' if num_queued == 1 else 'requests wait'} for it, and at "
        f"most {cap} may; "
        f"{_ask_again(retry_after_s)}, or send fewer at once.",
        reason=Reason.QUEUE_FULL,
        kind=ErrorKind.QUEUE_FULL,
        retry_after_s=retry_after_s,
    )


def build_queue_tokens_full(num_queued: int, cap: int, retry_after_s: int) -> Refusal:
    """Return the 503 for a queue that holds as many prompt tokens as it may."""
    return Refusal(
        f"The server is full: {num_queued} prompt tokens wait for it, and at most {cap} may; "
        f"{_ask_again(retry_after_s)}, or send shorter prompts.",
        reason=Reason.QUEUE_TOKENS_FULL,
        kind=ErrorKind.QUEUE_FULL,
        retry_after_s=retry_after_s,
    )


def build_queue_timeout(timeout_s: float, retry_after_s: int) -> Refusal:
    """Return the 503 for a request that nobody has begun to answer in time."""
    return Refusal(
        f"The request has waited {timeout_s:g} s without being started, the longest this server lets one wait; "
        f"{_ask_again(retry_after_s)}.",
        reason=Reason.QUEUE_TIMEOUT,
        kind=ErrorKind.QUEUE_TIMEOUT,
        retry_after_s=retry_after_s,
    )


def build_request_timeout(timeout_s: float) -> Refusal:
    """Return the error for a request that takes too long; asking again would bring the same."""
    return Refusal(
        f"The request has taken {timeout_s:g} s, the most this server gives one; ask for fewer tokens.",
        reason=Reason.REQUEST_TIMEOUT,
        kind=ErrorKind.REQUEST_TIMEOUT,
    )


def build_key_concurrency(cap: int, retry_after_s: int) -> Refusal:
    """Return the 429 for a key with as many requests in hand as it may have."""
    return Refusal(
        f"This key has {cap} requests in hand, the most it may have; wait for one of them to end.",
        reason=Reason.KEY_CONCURRENCY,
        kind=ErrorKind.RATE_LIMITED,
        retry_after_s=retry_after_s,
    )


def build_key_rate(per_minute: int, retry_after_s: int) -> Refusal:
    """Return the 429 for a key that has sent as many requests as it may."""
    return Refusal(
        f"This key may send {per_minute} requests a minute; {_ask_again(retry_after_s)}.",
        reason=Reason.KEY_RATE,
        kind=ErrorKind.RATE_LIMITED,
        retry_after_s=retry_after_s,
    )


def build_abort() -> RequestError:
    """Return the error for a request that the operator has ended."""
    return RequestError("The request was ended by this server's operator.", kind=ErrorKind.CANCELLED)


def _ask_again(retry_after_s: int) -> str:
    return f"ask again in {retry_after_s} s"
