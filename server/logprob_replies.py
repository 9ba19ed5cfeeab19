"""Logprobs in OpenAI's two shapes and in vLLM's one for prompts. Pure; a part of replies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.generation import LikelyToken, TokenText

# JSON has no infinity; what vLLM and OpenAI say for a token that is as good as impossible.
_MIN_LOGPROB = -9999.0


def build_completion_logprobs(tokens: Sequence[TokenText], *, base_offset: int = 0) -> dict[str, Any]:
    """Return the ``logprobs`` of a text completion.

    Args:
        tokens: Of the prompt, where it is echoed, then of the output.
        base_offset: Characters of the choice's text before the text that the tokens' own offsets count in.
    """
    return {
        "tokens": [show_token(token.data) for token in tokens],
        "token_logprobs": [_clamp(token.logprob) for token in tokens],
        "top_logprobs": [_build_top_map(token) for token in tokens],
        "text_offset": [base_offset + token.offset for token in tokens],
    }


def join_completion_logprobs(*parts: dict[str, Any]) -> dict[str, Any]:
    """Return one ``logprobs`` for several texts in a row."""
    return {name: [entry for part in parts for entry in part[name]] for name in parts[0]}


def build_chat_logprobs(tokens: Sequence[TokenText]) -> dict[str, Any]:
    """Return the ``logprobs`` of a chat choice."""
    content = [
        {**_build_entry(token), "top_logprobs": [_build_entry(likely) for likely in token.top]} for token in tokens
    ]
    return {"content": content, "refusal": None}


def build_prompt_logprobs(tokens: Sequence[TokenText]) -> list[dict[str, Any] | None]:
    """Return vLLM's ``prompt_logprobs``: per token the likeliest ones and itself by id; null for the first."""
    return [None if token.logprob is None else _build_rank_map(token) for token in tokens]


def show_token(data: bytes) -> str:
    """Return a token's text; a part of a character is spelt in bytes, as OpenAI does, so that no two look alike."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _build_top_map(token: TokenText) -> dict[str, float | None] | None:
    if token.logprob is None:
        return None
    # The token itself is always among them: so clients can rely on it. Of two that look alike the likelier one stays.
    shown: dict[str, float | None] = {}
    for likely in (*token.top, LikelyToken(token.token_id, token.data, token.logprob)):
        shown.setdefault(show_token(likely.data), _clamp(likely.logprob))
    return shown


def _build_entry(token: TokenText | LikelyToken) -> dict[str, Any]:
    return {"token": show_token(token.data), "logprob": _clamp(token.logprob), "bytes": list(token.data)}


def _build_rank_map(token: TokenText) -> dict[str, Any]:
    ranked = {likely.token_id: (rank, likely.data, likely.logprob) for rank, likely in enumerate(token.top, start=1)}
    assert token.logprob is not None and token.rank is not None
    ranked.setdefault(token.token_id, (token.rank, token.data, token.logprob))
    return {
        str(token_id): {"logprob": _clamp(logprob), "rank": rank, "decoded_token": show_token(data)}
        for token_id, (rank, data, logprob) in ranked.items()
    }


def _clamp(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _MIN_LOGPROB)
