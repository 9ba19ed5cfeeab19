"""Cascade attention: how many leading KV blocks all rows of a step share, for kernels that read them once."""

from __future__ import annotations

from collections.abc import Sequence

from engine_core.request import Request
from engine_core.scheduler.constraint import Constraint
from engine_core.scheduler.output import SchedulerOutput
from engine_core.scheduler.step_plan import StepPlan


class CommonPrefix(Constraint):
    """Counts from the block tables themselves: a block's owners may include requests that are not in the step.

    A prefix counts only as far as every row has computed it, so a row still in it makes it shorter. Remembers the
    answer while the same rows go on: entries of a table never change, so only the computed part can move it.

    Source: scheduler.md CA1 to CA3.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._rows: set[Request] = set()
        self._num_equal = 0
        self._num_compared = 0

    def annotate(self, output: SchedulerOutput, plan: StepPlan) -> None:
        """Count for the step's rows; 0 for a single one, which shares with nobody."""
        if plan.num_rows < 2:
            return
        # A set: a row that grows changes its place among the others, and nothing else.
        rows = {*plan.decodes, *(row.request for row in plan.rows)}
        num_computed = min(output.starts) // self._block_size
        if rows != self._rows or (self._num_equal == self._num_compared < num_computed):
            self._rows, self._num_compared = rows, num_computed
            self._num_equal = _count_equal([row.block_ids for row in rows], num_computed)
        output.num_common_prefix_blocks = min(self._num_equal, num_computed)

    def release(self, request: Request) -> None:
        """Its table is gone; the next one may differ."""
        self._rows = set()


def _count_equal(tables: Sequence[Sequence[int]], limit: int) -> int:
    """Return the number of leading entries, at most ``limit``, that all tables have in common."""
    first = tables[0][:limit]
    for table in tables[1:]:
        if table[: len(first)] != first:
            first = first[: next(i for i, block in enumerate(first) if table[i] != block)]
    return len(first)
