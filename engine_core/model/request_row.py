"""RequestRow: what the runner keeps of one running request."""

from __future__ import annotations

import numpy as np

from engine_core.messages import TokenLogprobs
from engine_core.model.device_sampler import RowRecord
from engine_core.model.sampler import OwnTokens
from engine_core.sampling_params import SamplingParams
from engine_core.scheduler.output import NewRequestData
from kernels.backend import IntArray


class RequestRow:
    """One running request: its tokens, its block table and how to sample it.

    A token that was sampled but is on the device only stands as ``~slot`` until it is known.

    Attributes:
        slot: Its place in what is kept a request on the device; nobody else's while it runs.
        device_record: What the device's sampler is told of it; made by whoever needs it.
        prompt_logprobs: Of the prompt's tokens from the second on, as far as computed, where the request asked for them
            and has not got them; else None. A request that comes back without an output starts anew, one that has
            outputs has them.
        is_bent: Whether something is done to its logits before a token is picked, or somebody asks how likely it was.
        is_greedy: Whether its likeliest token is the one it gets, and nobody asks how likely.
    """

    __slots__ = (
        "_block_ids",
        "_token_ids",
        "device_record",
        "is_bent",
        "is_greedy",
        "num_blocks",
        "num_prompt_tokens",
        "num_tokens",
        "prompt_logprobs",
        "request_id",
        "sampling",
        "slot",
    )

    def __init__(self, data: NewRequestData, *, max_model_len: int, block_size: int, slot: int) -> None:
        self.request_id = data.request_id
        self.slot = slot
        self.device_record: RowRecord | None = None
        self.sampling: SamplingParams = data.sampling_params
        self.num_prompt_tokens = data.num_prompt_tokens
        longest = min(max_model_len, data.num_prompt_tokens + data.sampling_params.max_tokens)
        self._token_ids: IntArray = np.empty(max(longest, len(data.token_ids)) + 1, np.int32)
        self._block_ids: IntArray = np.empty(-(-len(self._token_ids) // block_size) + 1, np.int32)
        self.num_tokens = len(data.token_ids)
        self._token_ids[: self.num_tokens] = data.token_ids
        self.num_blocks = 0
        self.append_blocks(data.block_ids)
        self.is_bent = _is_bent(self.sampling)
        self.is_greedy = self.sampling.temperature == 0.0 and self.sampling.min_tokens == 0 and not self.is_bent
        is_gathering = self.sampling.num_prompt_logprobs is not None and self.num_tokens == self.num_prompt_tokens
        self.prompt_logprobs: list[TokenLogprobs] | None = [] if is_gathering else None

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    def own_tokens(self) -> OwnTokens:
        return OwnTokens(
            prompt=self._token_ids[: self.num_prompt_tokens],
            output=self._token_ids[self.num_prompt_tokens : self.num_tokens],
        )

    def token(self, position: int) -> int:
        return self._token_ids.item(position)

    def tokens(self, start: int, stop: int) -> IntArray:
        return self._token_ids[start:stop]

    def block(self, index: int) -> int:
        return self._block_ids.item(index)

    def blocks(self, num: int) -> IntArray:
        return self._block_ids[:num]

    def append_token(self, token_id: int) -> None:
        self._token_ids[self.num_tokens] = token_id
        self.num_tokens += 1

    def append_unknown(self) -> int:
        """Append a token that is on the device only; return its position, for set_token()."""
        self.append_token(~self.slot)
        return self.num_tokens - 1

    def set_token(self, position: int, token_id: int) -> None:
        self._token_ids[position] = token_id

    def is_picked_on_device(self) -> bool:
        """Whether the device's sampler, which sees nothing but logits and the record, can pick its next token."""
        return not self.is_bent and self.num_output_tokens >= self.sampling.min_tokens

    def append_blocks(self, block_ids: list[int]) -> None:
        end = self.num_blocks + len(block_ids)
        self._block_ids[self.num_blocks : end] = block_ids
        self.num_blocks = end


def _is_bent(sampling: SamplingParams) -> bool:
    return bool(
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.logit_bias
        or sampling.num_logprobs is not None
    )
