"""The common prefix of a step's rows (CA1 to CA3)."""

from __future__ import annotations

from typing import Any

from engine_core.config import SchedulerConfig
from engine_core.scheduler.constraints import build_constraints
from engine_core.scheduler.constraints.cascade import CommonPrefix
from tests.engine_core.scheduler.scenario_helpers import SitOut, abort_all, foretell, propose, run_to_end
from tests.engine_core.scheduler.scheduler_helpers import Harness, create_scheduler

STEM = list(range(32))


def common_in_step(h: Harness) -> int:
    """Run a step and return its common prefix in blocks."""
    h.step()
    assert h.output is not None
    return h.output.num_common_prefix_blocks


def run_two(**overrides: Any) -> Harness:
    """Return a harness in which A and B decode after the two blocks of the stem, which they share."""
    h = Harness(create_scheduler(**{"enable_cascade_attn": True, **overrides}))
    h.add("A", [*STEM, 70], 40)
    h.step()
    h.add("B", [*STEM, 71, 72], 40)
    assert common_in_step(h) == 2
    return h


def test_ca2_off_unless_asked_for() -> None:
    assert build_constraints(SchedulerConfig(), block_size=16) == []
    (constraint,) = build_constraints(SchedulerConfig(enable_cascade_attn=True), block_size=16)
    assert isinstance(constraint, CommonPrefix)
    h = Harness(create_scheduler())
    h.add("A", STEM, 9)
    h.step()
    h.add("B", [*STEM, 7], 9)
    assert [common_in_step(h), common_in_step(h)] == [0, 0]
    abort_all(h)


def test_ca1_a_single_row_shares_with_nobody() -> None:
    h = Harness(create_scheduler(enable_cascade_attn=True))
    h.add("A", [*STEM, 70], 9)
    assert [common_in_step(h), common_in_step(h)] == [0, 0]
    abort_all(h)


def test_ca1_a_row_that_leaves_or_joins_changes_the_answer() -> None:
    h = run_two()
    h.add("stranger", 40, 3)
    assert [common_in_step(h) for _ in range(4)] == [0, 0, 0, 2]
    h.add("half", [*STEM[:16], *range(80, 90)], 3)
    # Its second block differs, and its own tokens are still to be computed.
    assert [common_in_step(h) for _ in range(4)] == [1, 1, 1, 2]
    h.abort("B")
    assert common_in_step(h) == 0
    abort_all(h)


def test_ca1_owners_that_sit_the_step_out_do_not_count() -> None:
    sit_out = SitOut()
    h = run_two(constraints=[sit_out, CommonPrefix(16)])
    h.add("stranger", 40, 30)
    assert common_in_step(h) == 0
    sit_out.request_ids = {"stranger"}
    assert common_in_step(h) == 2
    sit_out.request_ids = {"B"}
    assert common_in_step(h) == 0
    sit_out.request_ids = {"A"}
    assert common_in_step(h) == 0
    sit_out.request_ids = set()
    assert common_in_step(h) == 0
    abort_all(h)


def test_ca1_equal_content_in_different_blocks_is_not_common() -> None:
    h = Harness(create_scheduler(enable_cascade_attn=True, enable_prefix_caching=False))
    h.add("A", [*STEM, 70], 9)
    h.add("B", [*STEM, 70], 9)
    assert [common_in_step(h) for _ in range(3)] == [0, 0, 0]
    abort_all(h)


def test_ca3_rows_still_in_the_prefix_make_it_shorter() -> None:
    h = Harness(create_scheduler(enable_cascade_attn=True))
    h.add("A", [*STEM, 70], 30)
    h.add("B", [*STEM, 71], 30)
    assert h.schedule() == {"A": 33, "B": 1}
    assert h.table("A")[:2] == h.table("B")[:2]
    assert h.output is not None and h.output.num_common_prefix_blocks == 0, "A computes it in this very step"
    h.update()
    assert common_in_step(h) == 2
    h.add("late", [*STEM[:16], *range(80, 120)], 30)
    assert common_in_step(h) == 1
    abort_all(h)


def test_ca3_chunks_of_the_prefix_count_once_they_are_computed() -> None:
    h = Harness(create_scheduler(enable_cascade_attn=True, max_chunk_size=16))
    h.add("A", [*STEM, 70], 30)
    h.add("B", [*STEM, 71], 30)
    # B finds A's first chunk in the step that computes it (A11), and computes its second block beside A.
    assert [common_in_step(h) for _ in range(4)] == [0, 1, 1, 1]
    abort_all(h)


def test_ca2_the_answer_grows_with_what_is_computed() -> None:
    # Both decode the same tokens, but in blocks of their own: the common part ends with the prompt.
    h = Harness(create_scheduler(enable_cascade_attn=True, block_size=4))
    prompt = list(range(8))
    h.add("A", prompt, 30)
    h.step()
    h.add("B", prompt, 30)
    counts = [common_in_step(h) for _ in range(9)]
    assert counts == [1] * 9, "the second block was computed twice (K5)"
    abort_all(h)


def test_ca2_a_table_that_was_built_anew_is_compared_anew() -> None:
    h = run_two()
    assert common_in_step(h) == 2
    assert h.scheduler.reset_prefix_cache(reset_running=True)
    assert [common_in_step(h), common_in_step(h)] == [0, 2]
    h.scheduler.reset_prefix_cache(reset_running=True)
    h.scheduler.kv_cache.enable_prefix_caching = False
    assert [common_in_step(h), common_in_step(h)] == [0, 0], "the same rows, blocks of their own"
    abort_all(h)


def test_ca3_a_rejected_draft_moves_the_limit_back() -> None:
    h = Harness(create_scheduler(enable_cascade_attn=True, block_size=4))
    stem = list(range(12))
    h.add("A", [*stem, 1], 30)
    h.step()
    h.add("B", [*stem, 2], 30)
    h.step()
    for _ in range(6):
        propose(h, 3)
        assert common_in_step(h) == 3
    run_to_end(h)
    assert h.token_ids["B"] == foretell([*stem, 2], 30)
