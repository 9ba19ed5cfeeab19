"""The mathematics of the fake FlashInfer: paged attention with its log-sum-exp, written to be obviously right.

One request after the other, in fp32. Knows no wrappers and checks nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PagedBatch:
    """A batch's tokens and pages, as the kernels read them from the device.

    Attributes:
        qo_indptr: [B+1] token units.
        kv_indptr: [B+1] page units.
        kv_indices: At least [kv_indptr[-1]] page ids.
        last_page_len: [B], 1..page_size.
    """

    qo_indptr: torch.Tensor
    kv_indptr: torch.Tensor
    kv_indices: torch.Tensor
    last_page_len: torch.Tensor

    def kv_lens(self, page_size: int) -> list[int]:
        """Return how many tokens each request has in its pages."""
        bounds = self.kv_indptr.tolist()
        return [
            (end - start - 1) * page_size + last if end > start else 0
            for start, end, last in zip(bounds, bounds[1:], self.last_page_len.tolist(), strict=False)
        ]


@dataclass(frozen=True, slots=True)
class AttentionKind:
    """What the kernel was compiled and launched with.

    Attributes:
        causal: The last query sees the last key (bottom-right); else every query sees every key.
        window_left: A query sees itself and so many keys before it; -1 = all.
        soft_cap: 0 = none; else scores are ``cap * tanh(scores / cap)``.
        sm_scale: Of the scores, before the cap.
    """

    causal: bool
    window_left: int
    soft_cap: float
    sm_scale: float


def visible_keys(q_len: int, kv_len: int, kind: AttentionKind) -> torch.Tensor:
    """Return bool [q_len, kv_len]: which key each query sees. The last query stands at the last key."""
    position = torch.arange(kv_len - q_len, kv_len).unsqueeze(1)
    key = torch.arange(kv_len).unsqueeze(0)
    mask = torch.ones(q_len, kv_len, dtype=torch.bool)
    if kind.causal:
        mask &= key <= position
    if kind.window_left >= 0:
        mask &= key + kind.window_left >= position
    return mask


def attend_request(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kind: AttentionKind
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from one request's queries to its keys.

    Args:
        q: [q_len, num_qo_heads, head_dim].
        k: [kv_len, num_kv_heads, head_dim].
        v: [kv_len, num_kv_heads, head_dim].
        kind: Mask, scale and cap.

    Returns:
        Output [q_len, num_qo_heads, head_dim] and log-sum-exp to the base 2, [q_len, num_qo_heads], both fp32.
        A query that sees nothing gives 0 and -inf.
    """
    num_kv_heads = k.shape[1]
    mask = visible_keys(q.shape[0], k.shape[0], kind)
    grouped = q.float().unflatten(1, (num_kv_heads, -1))  # type: ignore[no-untyped-call]
    scores = torch.einsum("qhgd,khd->qhgk", grouped, k.float()) * kind.sm_scale
    if kind.soft_cap > 0:
        scores = kind.soft_cap * torch.tanh(scores / kind.soft_cap)
    blind = ~mask.any(dim=1)
    scores = scores.masked_fill(~mask[:, None, None], -math.inf)
    lse = torch.logsumexp(scores, dim=-1) / math.log(2)
    weights = torch.softmax(scores, dim=-1).masked_fill(blind[:, None, None, None], 0)
    # A page may hold anything outside of the window: what no query sees must not reach it as 0 * NaN.
    values = v.float().masked_fill(~mask.any(dim=0)[:, None, None], 0)
    out = torch.einsum("qhgk,khd->qhgd", weights, values)
    return out.flatten(1, 2), lse.flatten(1, 2)


def attend_paged(
    q: torch.Tensor, pool: torch.Tensor, batch: PagedBatch, kind: AttentionKind
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from every request's queries to its pages.

    Args:
        q: [T, num_qo_heads, head_dim].
        pool: [num_pages, 2, page_size, num_kv_heads, head_dim].
        batch: Tokens and pages.
        kind: Mask, scale and cap.

    Returns:
        Output [T, num_qo_heads, head_dim] and log-sum-exp to the base 2, [T, num_qo_heads], both fp32.
    """
    out = torch.zeros(q.shape, dtype=torch.float32)
    lse = torch.full(q.shape[:2], -math.inf)
    rows, pages = batch.qo_indptr.tolist(), batch.kv_indptr.tolist()
    for i, kv_len in enumerate(batch.kv_lens(pool.shape[2])):
        own = slice(rows[i], rows[i + 1])
        table = batch.kv_indices[pages[i] : pages[i + 1]].long()
        k, v = (pool[table, which].flatten(0, 1)[:kv_len] for which in (0, 1))
        out[own], lse[own] = attend_request(q[own], k, v, kind)
    return out, lse


def merge(
    v_a: torch.Tensor, s_a: torch.Tensor, v_b: torch.Tensor, s_b: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the attention over both sets of keys, from that over each.

    Args:
        v_a: [T, H, D] output over the one set.
        s_a: [T, H] its log-sum-exp to the base 2.
        v_b: [T, H, D] output over the other.
        s_b: [T, H].

    Returns:
        Output and log-sum-exp, both fp32.
    """
    top = torch.maximum(s_a, s_b).float()
    weight_a, weight_b = torch.exp2(s_a.float() - top), torch.exp2(s_b.float() - top)
    total = weight_a + weight_b
    merged = v_a.float() * (weight_a / total).unsqueeze(-1) + v_b.float() * (weight_b / total).unsqueeze(-1)
    return merged, top + torch.log2(total)
