"""One row of logits to a token id: a function of the row, its request's parameters and tokens, and nothing else.

Not of the batch, of the place in it, or of threads: numpy, one row at a time, on memory of the row's own. The order:

     1. logit_bias is added
     2. repetition_penalty divides the positive and multiplies the negative logits of the prompt's and the output's ids
     3. frequency_penalty, once for each time in the output, and presence_penalty are taken off
     4. while the output is shorter than min_tokens, its end tokens cannot come: last, so that no bias undoes it
     5. temperature 0: the greatest logit, the lowest id among equals. That is all
     6. weights = exp((logit - greatest) / temperature)
     7. top_k keeps exactly so many
     8. top_p keeps the nucleus of what top_k left
     9. min_p keeps what weighs at least its share of the heaviest
    10. the draw: the greatest weight / E, with E an exponential number of (seed, output index, token id)

Ids that the tokenizer does not know, which a padded LM head has, are not in the row.

Source: the draw is the exponential race, as good as the Gumbel-max trick. A weight that is off by one part in a million
changes the winner about once in a million draws; a walk along cumulated weights changes with any of those before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine_core.model.cuts import likeliest, nucleus
from engine_core.model.noise import DrawPurpose, FloatRow, exponentials
from engine_core.sampling_params import SamplingParams
from kernels.backend import IntArray

# Below it a weight other than the heaviest is 0 for any logits that a model gives, and floats soon run out.
LEAST_TEMPERATURE = 1e-20
_GREATEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class OwnTokens:
    """A request's tokens so far.

    Attributes:
        prompt: [num_prompt_tokens].
        output: [num_output_tokens].
    """

    prompt: IntArray
    output: IntArray


def are_finite(logits: NDArray[np.float32]) -> NDArray[np.bool_]:
    """Tell of each row whether none of its logits is NaN or infinite: [n, vocab] -> [n]."""
    finite: NDArray[np.bool_] = np.isfinite(logits.min(axis=1)) & np.isfinite(logits.max(axis=1))  # both hand NaN on
    return finite


def pick_token(logits: FloatRow, params: SamplingParams, tokens: OwnTokens) -> int:
    """Pick the next token.

    Args:
        logits: [vocab], raw and finite; not changed.
        params: How.
        tokens: For the penalties; their number is the output index.
    """
    with np.errstate(all="ignore"):  # weights underflow by design, and logits of 3e38 may do as they like
        bent = _bend(logits, params, tokens)
        if params.temperature == 0.0:
            return int(bent.argmax())
        return _draw(bent, params, len(tokens.output))


def _draw(logits: FloatRow, params: SamplingParams, output_index: int) -> int:
    token_ids = np.arange(len(logits), dtype=np.uint32)
    if 0 < params.top_k < len(logits):
        kept = likeliest(logits, params.top_k)
        logits, token_ids = logits[kept], token_ids[kept]
    weights = np.exp((logits - logits.max()) / np.float32(max(params.temperature, LEAST_TEMPERATURE)))
    if params.top_p < 1.0:
        kept = nucleus(logits, weights, params.top_p)
        weights, token_ids = weights[kept], token_ids[kept]
    if params.min_p > 0.0:
        kept = np.flatnonzero(weights >= min(params.min_p, 1.0))  # the heaviest weighs exactly 1
        weights, token_ids = weights[kept], token_ids[kept]
    weights /= exponentials(params.seed, output_index, DrawPurpose.SAMPLE, token_ids)
    return int(token_ids[weights.argmax()])


# ---------------------------------------------------------------------- what a request asks to be done to its logits
def _bend(logits: FloatRow, params: SamplingParams, tokens: OwnTokens) -> FloatRow:
    """Return the logits with bias, penalties and mask applied: the same array where nothing is asked for."""
    is_masked = len(tokens.output) < params.min_tokens
    has_penalty = params.repetition_penalty != 1.0 or params.frequency_penalty or params.presence_penalty
    if not (is_masked or has_penalty or params.logit_bias):
        return logits
    bent = logits.copy()
    if params.logit_bias:
        ids = np.array(list(params.logit_bias), np.int64)
        values = np.array(list(params.logit_bias.values()), np.float64)
        known = (ids >= 0) & (ids < len(bent))
        _set(bent, ids[known], bent[ids[known]] + values[known])
    if params.repetition_penalty != 1.0:
        _penalize_repetition(bent, params.repetition_penalty, tokens)
    if params.frequency_penalty or params.presence_penalty:
        counts = np.bincount(tokens.output)[: len(bent)]
        ids = np.flatnonzero(counts)
        penalties = params.frequency_penalty * counts[ids] + params.presence_penalty
        _set(bent, ids, bent[ids] - penalties)
    if is_masked:
        _mask_end_tokens(bent, params)
    return bent


def _penalize_repetition(bent: FloatRow, penalty: float, tokens: OwnTokens) -> None:
    is_seen = np.zeros(len(bent), bool)
    for token_ids in (tokens.prompt, tokens.output):
        is_seen[token_ids[token_ids < len(bent)]] = True
    ids = np.flatnonzero(is_seen)
    values = bent[ids].astype(np.float64)
    _set(bent, ids, np.where(values > 0.0, values / penalty, values * penalty))


def _mask_end_tokens(bent: FloatRow, params: SamplingParams) -> None:
    ids = [token_id for token_id in params.end_token_ids if 0 <= token_id < len(bent)]
    if len(ids) < len(bent):  # where every token is an end, there is nothing else to pick
        bent[ids] = -np.inf


def _set(bent: FloatRow, ids: NDArray[np.int64], values: NDArray[np.float64]) -> None:
    """Write values computed in float64; what a float32 cannot hold becomes the greatest that it can."""
    bent[ids] = np.clip(values, -_GREATEST, _GREATEST)
