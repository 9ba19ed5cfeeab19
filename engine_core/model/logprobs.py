"""How likely the model itself found a token: logits as they came, before bias, penalties and temperature."""

from __future__ import annotations

import math

import numpy as np

from engine_core.messages import TokenLogprobs
from engine_core.model.cuts import by_likelihood, likeliest
from engine_core.model.noise import FloatRow


def token_logprobs(logits: FloatRow, token_id: int, num_top: int) -> TokenLogprobs:
    """Look one token up in the row that it was picked from, or that it followed.

    Args:
        logits: [n], raw and finite.
        token_id: Which. One beyond the row, as a prompt of ids may hold, cannot come: probability 0, the last rank.
        num_top: Likeliest tokens to name beside it; all where there are fewer.
    """
    greatest = float(logits.max())
    with np.errstate(under="ignore", over="ignore"):
        log_total = greatest + math.log(float(np.exp(logits - np.float32(greatest)).sum(dtype=np.float64)))
    logit = float(logits[token_id]) if token_id < len(logits) else -math.inf
    top = _likeliest_first(logits, min(num_top, len(logits)))
    return TokenLogprobs(
        token_id=token_id,
        logprob=logit - log_total,
        rank=1 + int(np.count_nonzero(logits > logit)),
        top_token_ids=tuple(top),
        top_logprobs=tuple(float(logits[top_id]) - log_total for top_id in top),
    )


def _likeliest_first(logits: FloatRow, num: int) -> list[int]:
    if num == 0:
        return []
    places = likeliest(logits, num) if num < len(logits) else np.arange(len(logits))
    token_ids: list[int] = by_likelihood(logits, places).tolist()
    return token_ids
