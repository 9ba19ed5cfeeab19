"""What the collector is told around serving."""

from __future__ import annotations

import gc
import weakref

from engine_core.housekeeping import collect_garbage, no_full_collections


class Node:
    """Something that refers to itself."""

    def __init__(self) -> None:
        self.me = self


def test_no_full_collection_starts_by_itself_while_serving() -> None:
    before, full = gc.get_threshold(), list[int]()

    def note(phase: str, info: dict[str, int]) -> None:
        if phase == "start" and info["generation"] == 2:
            full.append(1)

    with no_full_collections():
        gc.callbacks.append(note)
        kept = [[number] for number in range(200_000)]
        gc.callbacks.remove(note)
    assert full == [] and len(kept) == 200_000
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


def test_what_was_there_before_is_never_looked_at() -> None:
    with no_full_collections():
        assert len(gc.get_objects()) < 1000 < gc.get_freeze_count()


def test_garbage_of_serving_goes_in_a_pause() -> None:
    with no_full_collections():
        node = Node()
        gone = weakref.ref(node)
        gc.collect(1)  # as time passes, it gets into the oldest generation
        del node
        assert gone() is not None
        collect_garbage()
        assert gone() is None
