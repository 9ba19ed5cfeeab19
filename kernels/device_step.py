"""What the backend and the decoder see of one step on a device: views of one block that one copy has filled."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class CsrPages:
    """Page tables of a batch, on the host and on the device. All int32.

    Host tensors are views of pinned memory, which keeps its contents until the next step but one is laid out.

    Attributes:
        indptr_host: [B+1], page units.
        last_page_len_host: [B], 1..page_size.
        indptr: The same on the device.
        indices: [indptr[-1] or more] page ids, on the device; within a graph the whole room for them.
        last_page_len: [B], on the device.
    """

    indptr_host: torch.Tensor
    last_page_len_host: torch.Tensor
    indptr: torch.Tensor
    indices: torch.Tensor
    last_page_len: torch.Tensor


@dataclass(frozen=True, slots=True)
class StepTensors:
    """One step, perhaps padded to a graph's batch size. All int32; on the device unless the name says host.

    Padding requests have one token each, at position 0 of the null page (0), which nobody reads.

    Attributes:
        num_reqs: B, with padding.
        num_tokens: T, with padding.
        max_q_len: Longest query; 1 = all decode.
        qo_indptr_host: [B+1], token units.
        qo_indptr: The same on the device.
        token_ids: [T]. Negative: ``~slot`` of a token that is on the device only, sampled by an earlier step.
        positions: [T], for the rotary embedding.
        batch_indices: [T], whose token it is, 0..B-1.
        append_positions: [T], where its K and V go, counted over ``pages`` of its request.
        logit_rows: [R], token rows whose logits are wanted.
        pages: Each request's page table; without the shared pages where there are any.
        shared: The page table that all requests have in front, as a batch of one; None = no cascade.
        shared_qo_indptr_host: [2] ``[0, T]``, where there is ``shared``.
        shared_qo_indptr: The same on the device.
    """

    num_reqs: int
    num_tokens: int
    max_q_len: int
    qo_indptr_host: torch.Tensor
    qo_indptr: torch.Tensor
    token_ids: torch.Tensor
    positions: torch.Tensor
    batch_indices: torch.Tensor
    append_positions: torch.Tensor
    logit_rows: torch.Tensor
    pages: CsrPages
    shared: CsrPages | None = None
    shared_qo_indptr_host: torch.Tensor | None = None
    shared_qo_indptr: torch.Tensor | None = None
