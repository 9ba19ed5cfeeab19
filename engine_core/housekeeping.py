"""Garbage collection around serving: no full collection falls into a step.

A full collection walks every container object of the process, tens of milliseconds with a loaded model; it would hit
every running stream at once. What loading built never becomes garbage, so it is set aside; the rest waits for a pause.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# So many collections of the middle generation before a full one starts by itself: in practice never.
_NEVER = 1_000_000_000


@contextmanager
def no_full_collections() -> Iterator[None]:
    """Within, only ``collect_garbage`` collects the oldest generation; what existed before is never looked at."""
    young, middle, old = gc.get_threshold()
    gc.collect()
    gc.freeze()
    gc.set_threshold(young, middle, _NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)
        gc.unfreeze()


def collect_garbage() -> None:
    """Collect everything, in a pause of the serving."""
    gc.collect()
