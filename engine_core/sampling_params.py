"""How a request's tokens are picked and when it stops. Checked in the server; taken as valid here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling.

    Attributes:
        max_tokens: Output tokens at most, at least 1.
        min_tokens: Output tokens before an end token may end it; the length limits hold regardless.
        temperature: 0 = greedy.
        top_p: Nucleus: keep the smallest set of likeliest tokens whose probability reaches it, (0, 1].
        top_k: Keep the k likeliest tokens; 0 = all.
        seed: Draws depend on (seed, output index) only. The server draws one where the client gave none.
        eos_token_ids: The model's own end tokens.
        stop_token_ids: The client's.
        ignore_eos: Go on past ``eos_token_ids``.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
