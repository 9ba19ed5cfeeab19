"""The steps that are held against the machine's limits: what is in them, and how much multiplying they take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from kernels.backend import StepMeta

# The engine's own default: a longer context is computed over several steps.
MAX_STEP_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Span:
    """Tokens ``start:end`` of one request, to be computed in a step."""

    request: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Case:
    """A step to be timed.

    Attributes:
        name: For people.
        num_requests: Rows, where each computes one token.
        context: Tokens of each request that were computed before.
        num_new: Tokens of each request in the step.
    """

    name: str
    num_requests: int
    context: int
    num_new: int = 1

    @property
    def num_tokens(self) -> int:
        """Of the step."""
        return self.num_requests * self.num_new

    def spans(self) -> list[Span]:
        """Return what the step computes."""
        return [Span(request, self.context, self.context + self.num_new) for request in range(self.num_requests)]

    def fills(self) -> Iterator[list[Span]]:
        """Yield the steps that compute the context first."""
        for request in range(self.num_requests):
            for start in range(0, self.context, MAX_STEP_TOKENS):
                yield [Span(request, start, min(start + MAX_STEP_TOKENS, self.context))]

    def pages_per_request(self, page_size: int) -> int:
        """Return the pages that hold a request."""
        return -(-(self.context + self.num_new) // page_size)


CASES = (
    Case("1 row, context 64", 1, 64),
    Case("1 row, context 1,024", 1, 1024),
    Case("8 rows, context 64", 8, 64),
    Case("32 rows, context 64", 32, 64),
    Case("prefill of 512", 1, 0, 512),
)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """How large a model is.

    Attributes:
        weight_bytes: What a step of one row reads.
        num_layer_params: In the linears of all layers: each token is multiplied with them.
        num_head_params: Each row whose next token is wanted is multiplied with them.
    """

    weight_bytes: int
    num_layer_params: int
    num_head_params: int

    def operations(self, case: Case) -> float:
        """Return the multiplications and additions of a step's linears; attention's are not counted."""
        return 2.0 * (self.num_layer_params * case.num_tokens + self.num_head_params * case.num_requests)


def build_meta(spans: Sequence[Span], *, pages_per_request: int, page_size: int, vocab_size: int) -> StepMeta:
    """Lay out a step; request ``i`` owns the pages from ``i * pages_per_request`` on.

    Args:
        spans: One a request, in the requests' order.
        pages_per_request: As the pool was cut.
        page_size: Tokens a page.
        vocab_size: Token ids are drawn from it, always the same.
    """
    q_lens = np.array([span.end - span.start for span in spans], np.int32)
    kv_lens = np.array([span.end for span in spans], np.int32)
    num_pages = -(-kv_lens // page_size)
    positions = np.concatenate([np.arange(span.start, span.end, dtype=np.int32) for span in spans])
    first_pages = np.array([span.request * pages_per_request for span in spans], np.int32)
    pages = [first + np.arange(num, dtype=np.int32) for first, num in zip(first_pages, num_pages, strict=True)]
    qo_indptr = _starts(q_lens)
    return StepMeta(
        num_reqs=len(spans),
        num_tokens=len(positions),
        num_decodes=int((q_lens == 1).sum()),
        max_q_len=int(q_lens.max()),
        max_kv_len=int(kv_lens.max()),
        qo_indptr=qo_indptr,
        kv_indptr=_starts(num_pages),
        kv_indices=np.concatenate(pages),
        last_page_len=kv_lens - (num_pages - 1) * np.int32(page_size),
        kv_lens=kv_lens,
        token_ids=np.random.default_rng(0).integers(0, vocab_size, len(positions), np.int32),
        positions=positions,
        # A request's pages lie one behind the other.
        slot_mapping=positions + np.repeat(first_pages, q_lens) * np.int32(page_size),
        logit_rows=qo_indptr[1:] - np.int32(1),
    )


def _starts(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
