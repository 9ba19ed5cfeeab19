"""Where a step's arrays lie in its block: a function of how large they are, the same for all steps of one shape."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

ALIGNMENT = 4  # words: every section may be read 16 bytes at a time


@dataclass(frozen=True, slots=True)
class StepShape:
    """What decides where the sections lie. All steps of one shape lie alike.

    Attributes:
        num_reqs: B, with padding.
        num_tokens: T, with padding.
        num_rows: R, with padding.
        has_shared: Whether shared pages stand apart.
        is_padded: A decode step at a graph's batch size: its views keep their memory and length.
    """

    num_reqs: int
    num_tokens: int
    num_rows: int
    has_shared: bool
    is_padded: bool


@dataclass(slots=True)
class Sections:
    """Where each section starts, in words. ``indices`` is the last: it is as long as it must be."""

    shape: StepShape
    qo_indptr: int = 0
    kv_indptr: int = 0
    last_page_len: int = 0
    token_ids: int = 0
    positions: int = 0
    batch_indices: int = 0
    append_positions: int = 0
    logit_rows: int = 0
    records: int = 0
    shared: int = 0  # qo_indptr [2], kv_indptr [2], last_page_len [1], each aligned
    shared_indices: int = 0
    indices: int = 0


class Layouts:
    """Lays sections out.

    Args:
        num_columns: Words of a record.
        max_pages: Page indices of one request at most.
    """

    def __init__(self, num_columns: int, max_pages: int) -> None:
        self._num_columns = num_columns
        self._max_pages = max_pages
        self._known: dict[StepShape, Sections] = {}

    def find(self, shape: StepShape) -> Sections:
        """Return where the sections of such a step lie."""
        if shape in self._known:
            return self._known[shape]
        sections, at = Sections(shape), 0
        for name, length in self._lengths(shape):
            setattr(sections, name, at)
            at += -(-length // ALIGNMENT) * ALIGNMENT
        if shape.is_padded:  # there are few of them, and each comes again
            self._known[shape] = sections
        return sections

    def _lengths(self, shape: StepShape) -> Iterator[tuple[str, int]]:
        yield "qo_indptr", shape.num_reqs + 1
        yield "kv_indptr", shape.num_reqs + 1
        yield "last_page_len", shape.num_reqs
        yield "token_ids", shape.num_tokens
        yield "positions", shape.num_tokens
        yield "batch_indices", shape.num_tokens
        yield "append_positions", shape.num_tokens
        yield "logit_rows", shape.num_rows
        yield "records", shape.num_rows * self._num_columns
        if shape.has_shared:
            yield "shared", 3 * ALIGNMENT
            yield "shared_indices", self._max_pages
        yield "indices", 0
