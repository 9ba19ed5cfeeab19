"""How likely the model itself found a token: logits as they came, before bias, penalties and temperature."""

from __future__ import annotations

import math

import numpy as np

from engine_core.messages import TokenLogprobs
from engine_core.model.cuts import by_likelihood, likeliest
from engine_core.model.noise import FloatRow


def token_logprobs(logits: FloatRow, token_id: int, num_top: int, num_token_ids: int) -> TokenLogprobs:
    """Look one token up in the row that it was picked from, or that it followed.

    Args:
        logits: [vocab], raw and finite.
        token_id: Which.
        num_top: Likeliest tokens to name beside it.
        num_token_ids: Ids that the tokenizer knows: none above is named, or counts for the rank.
    """
    greatest = float(logits.max())
    with np.errstate(under="ignore", over="ignore"):
        log_total = greatest + math.log(float(np.exp(logits - np.float32(greatest)).sum(dtype=np.float64)))
    known = logits[:num_token_ids]
    top = _likeliest_first(known, min(num_top, len(known)))
    return TokenLogprobs(
        token_id=token_id,
        logprob=float(logits[token_id]) - log_total,
        rank=1 + int(np.count_nonzero(known > logits[token_id])),
        top_token_ids=tuple(top),
        top_logprobs=tuple(float(logits[top_id]) - log_total for top_id in top),
    )


def _likeliest_first(logits: FloatRow, num: int) -> list[int]:
    if num == 0:
        return []
    places = likeliest(logits, num) if num < len(logits) else np.arange(len(logits))
    token_ids: list[int] = by_likelihood(logits, places).tolist()
    return token_ids
