"""DeviceWork: what one step has the device do, as kernels queued without a wait, from token ids to tokens.

Split in two, so that each can be a graph of its own: the body gives hidden states, the head gives tokens.
"""

from __future__ import annotations

from typing import Any

import torch

from engine_core.model.decoder import Decoder
from engine_core.model.device_sampler import Draw, pick_tokens, slots
from kernels.backend import KVPool, StepTensors


class DeviceWork:
    """A model on a device, and what its steps leave there for the next one.

    Args:
        decoder: The loaded model.
        kv: Its pages.
        device: Where.
        max_num_seqs: Slots; one more is for rows that nobody reads.
        max_num_rows: Rows of logits a step at most.
        num_token_ids: Ids that may be picked; the rest of the vocabulary is padding.

    Attributes:
        kv: As given.
        unread_slot: The slot for rows that nobody reads.
        sampled_ids: [max_num_seqs + 1] int32: the last token of each slot's request.
        reported: [max_num_rows] int32: a step's tokens, -1 where logits were not finite.
        hidden: [max_num_seqs, H]: what a body that is a graph hands to the head.
    """

    def __init__(
        self,
        *,
        decoder: Decoder,
        kv: KVPool,
        device: torch.device,
        max_num_seqs: int,
        max_num_rows: int,
        num_token_ids: int,
    ) -> None:
        self.kv = kv
        self.unread_slot = max_num_seqs
        self.sampled_ids = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)
        self.reported = torch.zeros(max_num_rows, dtype=torch.int32, device=device)
        self.hidden = torch.zeros(max_num_seqs, decoder.arch.hidden_size, dtype=decoder.dtype, device=device)
        self._decoder = decoder
        self._num_token_ids = num_token_ids

    def body(self, tensors: StepTensors, plan: Any) -> torch.Tensor:
        """Compute a step up to the head.

        Args:
            tensors: The step.
            plan: The backend's.

        Returns:
            [R, H]
        """
        return self._decoder.hidden(
            self._known_ids(tensors.token_ids), tensors.positions, tensors.logit_rows, plan, self.kv
        )

    def store_body(self, tensors: StepTensors, plan: Any) -> None:
        """Compute a decode step up to the head, into ``hidden``: a graph's body."""
        self.hidden[: tensors.num_reqs].copy_(self.body(tensors, plan))

    def head(self, hidden: torch.Tensor, records: torch.Tensor, draw: Draw) -> None:
        """Pick each row's token: into ``reported``, and into its slot of ``sampled_ids``.

        Args:
            hidden: [R, H], from the body.
            records: [R, NUM_COLUMNS].
            draw: At least what each record takes.
        """
        first = 0
        for logits in self._decoder.iter_logits(hidden):
            self._pick(first, logits, records[first : first + len(logits)], draw)
            first += len(logits)

    def head_with_logits(self, first: int, hidden: torch.Tensor, records: torch.Tensor, draw: Draw) -> torch.Tensor:
        """Do as head() for rows from ``first`` on, and return their logits, without padding: [n, num_token_ids]."""
        logits = self._decoder.logits(hidden)
        self._pick(first, logits, records, draw)
        return logits[:, : self._num_token_ids]

    def _known_ids(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Put what the step before has sampled in the place of ``~slot``."""
        sampled = self.sampled_ids.index_select(0, token_ids.bitwise_not().clamp_min_(0))
        return torch.where(token_ids < 0, sampled, token_ids)

    def _pick(self, first: int, logits: torch.Tensor, records: torch.Tensor, draw: Draw) -> None:
        picked = pick_tokens(logits[:, : self._num_token_ids], records, draw)
        self.sampled_ids.index_copy_(0, slots(records).to(torch.int64), picked.token_ids)
        self.reported[first : first + len(logits)].copy_(picked.reported)
