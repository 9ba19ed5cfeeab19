"""sampler.py's steps 5 to 10 for a whole batch on the device, each row by its own record. No host waits.

What bends logits (bias, penalties, masks) is the host's. A row gets the token that the host would pick from the same
logits, unless floats are as good as equal: one function, computed by two machines.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import torch

from engine_core.model.device_noise import exponentials
from engine_core.model.noise import DrawPurpose, key_bytes
from engine_core.model.sampler import LEAST_TEMPERATURE
from engine_core.sampling_params import SamplingParams

# A record is what the device is told of one row of logits, in 32-bit words:
#   0,1 top_p (float64) | 2 temperature | 3 min_p | 4 top_k | 5 slot | 6,7,8 key of the noise | 9 unused, so that the
#   next row's float64 is aligned
NUM_COLUMNS = 10
_TOP_P, _TEMPERATURE, _MIN_P, _TOP_K, _SLOT, _KEY = 0, 2, 3, 4, 5, 6
_HEAD = struct.Struct("<dffii")
_NO_KEY = bytes(16)
_END = bytes(4)
_MAX_TOP_K = 2**31 - 1
# A top_k up to the first is cut from the second's number of candidates: they hold it, and whoever is as likely as its
# last, unless hundreds are. Finding them reads the logits twice; a sort of 152k takes some ten times as long.
_MAX_SMALL_TOP_K, _NUM_CANDIDATES = 256, 1024
# Sorting takes some twelve times the memory of the logits: of more than these, fp32, a part is sorted at a time.
_MAX_SORTED_BYTES = 64 << 20


class Draw(IntEnum):
    """What it takes to pick tokens. A step takes what its rows take together: Draw.of(one | other)."""

    GREEDY = 0
    RACE = 1  # chance decides among all tokens, or those above min_p
    TOP = 2  # among the few that a small top_k leaves
    RACE_AND_TOP = 3
    SORT = 4  # among the likeliest of all; does for every row

    @classmethod
    def of(cls, taken: int) -> Draw:
        return cls(min(taken, cls.SORT))


class RowRecord(NamedTuple):
    """What stays the same of a request's records.

    Attributes:
        draw: What its rows take.
        head: All words before the key.
        seed: Of the key.
    """

    draw: Draw
    head: bytes
    seed: int

    def words(self, output_index: int) -> bytes:
        """Return the record for the token of that index: NUM_COLUMNS words."""
        if self.draw is Draw.GREEDY:
            return self.head + _NO_KEY
        return self.head + key_bytes(self.seed, output_index, DrawPurpose.SAMPLE) + _END


def build_record(params: SamplingParams, slot: int) -> RowRecord:
    """Build a request's record.

    Args:
        params: How to sample; what bends logits is not looked at.
        slot: Where its tokens are kept on the device.
    """
    is_greedy = params.temperature == 0.0
    temperature = 0.0 if is_greedy else max(params.temperature, LEAST_TEMPERATURE)
    top_k = min(max(params.top_k, 0), _MAX_TOP_K)
    head = _HEAD.pack(params.top_p, temperature, min(params.min_p, 1.0), top_k, slot)
    return RowRecord(Draw.GREEDY if is_greedy else _draw_of(top_k, params.top_p), head, params.seed)


def _draw_of(top_k: int, top_p: float) -> Draw:
    if 0 < top_k <= _MAX_SMALL_TOP_K:
        return Draw.TOP
    return Draw.SORT if top_k or top_p < 1.0 else Draw.RACE


def greedy_record(slot: int) -> bytes:
    """Return the record of a row that nobody reads, or whose token the host picks."""
    return _HEAD.pack(1.0, 0.0, 0.0, 0, slot) + _NO_KEY


def slots(records: torch.Tensor) -> torch.Tensor:
    """View the slots in records: [n] int32."""
    return records[:, _SLOT]


class Picked(NamedTuple):
    """One step's tokens, [n] int32 each.

    Attributes:
        token_ids: 0 where the logits are not finite.
        reported: The same, but -1 there.
    """

    token_ids: torch.Tensor
    reported: torch.Tensor


@torch.inference_mode()
def pick_tokens(logits: torch.Tensor, records: torch.Tensor, draw: Draw) -> Picked:
    """Pick a token for each row.

    Args:
        logits: [n, V] fp32, raw; not changed. A row that is not finite spoils no other.
        records: [n, NUM_COLUMNS] int32.
        draw: At least what each row's request takes.
    """
    likeliest = logits.argmax(1, keepdim=True)  # the lowest id among equals; NaN before all
    greatest = logits.gather(1, likeliest)
    is_finite = greatest.isfinite() & logits.amin(1, keepdim=True).isfinite()
    picked = likeliest
    if draw is not Draw.GREEDY:
        temperature = records.view(torch.float32)[:, _TEMPERATURE, None]
        drawn = _draw(logits, greatest, ~is_finite, records, draw)
        picked = torch.where(temperature > 0.0, drawn, likeliest)
    # masked_fill's number is an argument of its kernel; where()'s may be copied to the device, which no graph may do.
    is_spoiled = ~is_finite.squeeze(1)
    token_ids = picked.squeeze(1).to(torch.int32).masked_fill_(is_spoiled, 0)
    return Picked(token_ids, token_ids.masked_fill(is_spoiled, -1))


def _draw(
    logits: torch.Tensor, greatest: torch.Tensor, is_spoiled: torch.Tensor, records: torch.Tensor, draw: Draw
) -> torch.Tensor:
    greatest = greatest.masked_fill(is_spoiled, 0.0)
    if draw is Draw.SORT:
        size = max(1, _MAX_SORTED_BYTES // (4 * logits.shape[1]))
        parts = [slice(first, first + size) for first in range(0, len(logits), size)]
        return torch.cat(
            [_draw_sorted(logits[at].masked_fill(is_spoiled[at], 0.0), greatest[at], records[at]) for at in parts]
        )
    clean = logits.masked_fill(is_spoiled, 0.0)
    if draw is Draw.RACE:
        return _race(clean, greatest, records)
    drawn = _draw_top(clean, greatest, records)
    return drawn if draw is Draw.TOP else torch.where(_top_k(records) > 0, drawn, _race(clean, greatest, records))


def _race(logits: torch.Tensor, greatest: torch.Tensor, records: torch.Tensor) -> torch.Tensor:
    """Draw among all: [n, 1] int64. Takes ``logits`` for its own use."""
    token_ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    weights = _weigh_(logits, greatest, records)
    weights.masked_fill_(weights < _min_p(records), 0.0)  # the heaviest weighs exactly 1, and stays
    weights.div_(exponentials(_keys(records), token_ids))
    return weights.argmax(1, keepdim=True)


def _draw_sorted(logits: torch.Tensor, greatest: torch.Tensor, records: torch.Tensor) -> torch.Tensor:
    """Draw among the likeliest of all: [n, 1] int64."""
    ordered, order = logits.sort(dim=1, descending=True, stable=True)
    return _draw_ordered(ordered, order, greatest, records)


def _draw_top(logits: torch.Tensor, greatest: torch.Tensor, records: torch.Tensor) -> torch.Tensor:
    """Draw among the candidates: [n, 1] int64. They come in any order, and are sorted by id, then by logit."""
    values, token_ids = logits.topk(min(_NUM_CANDIDATES, logits.shape[1]), dim=1, sorted=False)
    token_ids, places = token_ids.sort(dim=1)
    ordered, order = values.gather(1, places).sort(dim=1, descending=True, stable=True)
    return _draw_ordered(ordered, token_ids.gather(1, order), greatest, records)


def _draw_ordered(
    ordered: torch.Tensor, token_ids: torch.Tensor, greatest: torch.Tensor, records: torch.Tensor
) -> torch.Tensor:
    """Cut and draw, given the logits likeliest first, of equal ones the lower ids first. Takes ``ordered``."""
    weights = _weigh_(ordered, greatest, records)
    top_k = _top_k(records)
    rank = torch.arange(ordered.shape[1], dtype=torch.int32, device=ordered.device)
    weights.masked_fill_((top_k > 0) & (rank >= top_k), 0.0)
    weights.masked_fill_(_is_outside_nucleus(weights, records), 0.0)
    weights.masked_fill_(weights < _min_p(records), 0.0)
    weights.div_(exponentials(_keys(records), token_ids.to(torch.int32)))
    return token_ids.gather(1, weights.argmax(1, keepdim=True))


def _is_outside_nucleus(weights: torch.Tensor, records: torch.Tensor) -> torch.Tensor:
    """Tell which tokens those before them, likeliest first, make superfluous: [n, V] bool."""
    top_p = records[:, _TOP_P : _TOP_P + 2].view(torch.float64)
    reached = weights.cumsum(1, dtype=torch.float64)
    goal = top_p * reached[:, -1:]
    is_reached = (reached >= goal) & (top_p < 1.0)
    return torch.cat((torch.zeros_like(is_reached[:, :1]), is_reached[:, :-1]), dim=1)


def _weigh_(logits: torch.Tensor, greatest: torch.Tensor, records: torch.Tensor) -> torch.Tensor:
    temperature = records.view(torch.float32)[:, _TEMPERATURE, None].clamp_min(LEAST_TEMPERATURE)
    return logits.sub_(greatest).div_(temperature).exp_()


def _min_p(records: torch.Tensor) -> torch.Tensor:
    return records.view(torch.float32)[:, _MIN_P, None]


def _top_k(records: torch.Tensor) -> torch.Tensor:
    return records[:, _TOP_K, None]


def _keys(records: torch.Tensor) -> torch.Tensor:
    return records[:, _KEY : _KEY + 3]
