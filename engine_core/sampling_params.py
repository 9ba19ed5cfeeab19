"""How a request's tokens are picked and when it stops. Checked in the server; taken as valid here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's sampling.

    Attributes:
        max_tokens: Output tokens at most, at least 1.
        min_tokens: Output tokens before an end token may end it; the length limits hold regardless.
        temperature: 0 = greedy.
        top_p: Nucleus: keep the smallest set of likeliest tokens whose probability reaches it, (0, 1].
        top_k: Keep the k likeliest tokens; 0 = all.
        min_p: Keep tokens at least this share as likely as the likeliest, [0, 1]; 0 = all.
        presence_penalty: Taken off the logit of every token that the output holds.
        frequency_penalty: Taken off it once for each time that the output holds it.
        repetition_penalty: Divides the positive and multiplies the negative logits of tokens that the prompt or the
            output holds; 1 = off.
        logit_bias: Added to the logits of these token ids.
        seed: Draws depend on (seed, output index) only. The server draws one where the client gave none.
        eos_token_ids: The model's own end tokens.
        stop_token_ids: The client's.
        ignore_eos: Go on past ``eos_token_ids``.
        num_logprobs: Report each output token's logprob, and those of so many likeliest tokens beside it; None = none.
        num_prompt_logprobs: The same of the prompt's tokens, from the second on.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    eos_token_ids: frozenset[int] = frozenset()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None

    @property
    def end_token_ids(self) -> frozenset[int]:
        """Every token id that ends the request."""
        return self.stop_token_ids if self.ignore_eos else self.stop_token_ids | self.eos_token_ids
