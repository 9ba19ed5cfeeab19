"""Builds a StepMeta from (q_len, kv_len) pairs over shuffled pages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from kernels.backend import StepMeta

Request = tuple[int, int]  # q_len, kv_len


def pages_needed(requests: Sequence[Request], page_size: int) -> int:
    return sum(-(-kv_len // page_size) for _, kv_len in requests)


def shuffled_tables(requests: Sequence[Request], *, page_size: int, num_pages: int, seed: int) -> list[list[int]]:
    """One page table a request, from one shuffled pool of pages; no page twice."""
    free = np.random.default_rng(seed).permutation(num_pages).tolist()
    assert pages_needed(requests, page_size) <= num_pages
    return [[free.pop() for _ in range(-(-kv_len // page_size))] for _, kv_len in requests]


def build_step(requests: Sequence[Request], tables: Sequence[Sequence[int]], *, page_size: int) -> StepMeta:
    """The step in which each request computes its last q_len tokens; a table may be longer than kv_len needs."""
    used = [list(table[: -(-kv_len // page_size)]) for (_, kv_len), table in zip(requests, tables, strict=True)]
    positions = [list(range(kv_len - q_len, kv_len)) for q_len, kv_len in requests]
    slots = [
        table[position // page_size] * page_size + position % page_size
        for table, row in zip(used, positions, strict=True)
        for position in row
    ]
    q_lens = [q_len for q_len, _ in requests]
    kv_lens = [kv_len for _, kv_len in requests]
    num_tokens = sum(q_lens)
    decodes = next((i for i, q_len in enumerate(q_lens) if q_len > 1), len(q_lens))
    assert all(q_len > 1 for q_len in q_lens[decodes:]), "decodes come first"
    return StepMeta(
        num_reqs=len(requests),
        num_tokens=num_tokens,
        num_decodes=decodes,
        max_q_len=max(q_lens),
        max_kv_len=max(kv_lens),
        qo_indptr=_int32([0, *accumulate(q_lens)]),
        kv_indptr=_int32([0, *accumulate(len(table) for table in used)]),
        kv_indices=_int32([page for table in used for page in table]),
        last_page_len=_int32([(kv_len - 1) % page_size + 1 for kv_len in kv_lens]),
        kv_lens=_int32(kv_lens),
        token_ids=np.zeros(num_tokens, dtype=np.int32),
        positions=_int32([position for row in positions for position in row]),
        slot_mapping=_int32(slots),
        logit_rows=_int32([end - 1 for end in accumulate(q_lens)]),
    )


def _int32(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, dtype=np.int32)
