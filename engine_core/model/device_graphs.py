"""Decode steps as graphs: captured at start, largest first, one replay each instead of hundreds of launches.

A step is two graphs, so that there are few: the body by (batch size, cascade), the head by (batch size, draw).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from engine_core.model.device_sampler import NUM_COLUMNS, Draw, greedy_record
from engine_core.model.device_work import DeviceWork
from kernels.accelerator import Graph
from kernels.backend import DeviceBackend, IntArray, StepMeta
from kernels.step_block import StepBlock

Progress = Callable[[float, str], None]
# The shared prefix that backends are asked about: long enough for any of them.
_SHARED_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class StepGraphs:
    """What was captured.

    Attributes:
        sizes: Batch sizes, ascending.
        bodies: By (size, whether shared pages stand apart).
        heads: By (size, draw).
    """

    sizes: Sequence[int] = ()
    bodies: dict[tuple[int, bool], Graph] = field(default_factory=dict)
    heads: dict[tuple[int, Draw], Graph] = field(default_factory=dict)

    def size_for(self, num_reqs: int) -> int:
        """Return the smallest batch size that holds so many requests; 0 = there is none."""
        place = bisect_left(self.sizes, num_reqs)
        return self.sizes[place] if place < len(self.sizes) else 0

    def has_cascade(self, size: int) -> bool:
        """Whether a step of that batch size may have its shared pages apart."""
        return (size, True) in self.bodies


class _Capture(NamedTuple):
    """One graph to be: its body's key, or its head's."""

    size: int
    num_shared_pages: int
    draw: Draw | None


def capture_graphs(
    *, work: DeviceWork, block: StepBlock, backend: DeviceBackend, sizes: Sequence[int], on_progress: Progress
) -> StepGraphs:
    """Capture decode steps of these batch sizes.

    Args:
        work: What is captured. Its model's rotary tables reach as far as they ever will.
        block: Where steps are laid out.
        backend: Plans.
        sizes: Ascending.
        on_progress: Gets the part that is done and a line for whoever waits.
    """
    graphs = StepGraphs(tuple(sizes))
    num_shared_pages = min(-(-_SHARED_TOKENS // work.kv.page_size), block.max_pages - 1, work.kv.num_pages - 1)
    captures = [each for size in reversed(sizes) for each in _captures(size, num_shared_pages, work, backend)]
    for count, capture in enumerate(captures, start=1):
        on_progress((count - 1) / len(captures), f"capturing graphs {count} of {len(captures)}")
        _capture(capture, graphs, work, block, backend)
    return graphs


def _captures(size: int, num_common_pages: int, work: DeviceWork, backend: DeviceBackend) -> Iterator[_Capture]:
    yield _Capture(size, 0, None)
    num_shared_pages = backend.num_shared_pages(_idle_step(size, num_common_pages, work.kv.page_size), work.kv)
    if num_shared_pages:
        yield _Capture(size, num_shared_pages, None)
    yield from (_Capture(size, 0, draw) for draw in Draw)


def _capture(capture: _Capture, graphs: StepGraphs, work: DeviceWork, block: StepBlock, backend: DeviceBackend) -> None:
    size, num_shared_pages, draw = capture
    meta = _idle_step(size, num_shared_pages, work.kv.page_size)
    nobody = np.frombuffer(greedy_record(work.unread_slot) * size, np.int32).reshape(size, NUM_COLUMNS)
    tensors, records = block.load(meta, nobody, num_shared_pages=num_shared_pages, num_padded=size)
    if draw is not None:
        hidden = work.hidden[:size]
        graphs.heads[size, draw] = _record(backend, lambda: work.head(hidden, records, draw))
        return
    plan = backend.plan_step(tensors, work.kv, in_graph=True)
    graphs.bodies[size, num_shared_pages > 0] = _record(backend, lambda: work.store_body(tensors, plan))


@torch.inference_mode()
def _record(backend: DeviceBackend, body: Callable[[], None]) -> Graph:
    body()  # once for real: what is compiled or allocated at first use must not be captured
    return backend.accelerator.capture(body)


def _idle_step(num_reqs: int, num_shared_pages: int, page_size: int) -> StepMeta:
    """Lay out a decode step that writes the null page alone: each request's one own page. Shared ones are only read."""
    table = np.array([*range(1, num_shared_pages + 1), 0], np.int32)
    each = np.arange(num_reqs + 1, dtype=np.int32)
    ones: IntArray = np.ones(num_reqs, np.int32)
    start = num_shared_pages * page_size
    return StepMeta(
        num_reqs=num_reqs,
        num_tokens=num_reqs,
        num_decodes=num_reqs,
        max_q_len=1,
        max_kv_len=start + 1,
        qo_indptr=each,
        kv_indptr=each * np.int32(len(table)),
        kv_indices=np.tile(table, num_reqs),
        last_page_len=ones,
        kv_lens=ones + np.int32(start),
        token_ids=ones * 0,
        positions=ones * np.int32(start),
        slot_mapping=ones * 0,
        logit_rows=each[:-1],
        num_common_pages=num_shared_pages,
    )
