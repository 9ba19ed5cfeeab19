"""Bugs that other engines have had, replayed (scheduler.md section 6). The number in a name is the report's.

Not here, for want of the feature: BUG-09, 65 (encoder inputs); BUG-19, 43, 45, 47, 67, 69 (connectors); BUG-33, 35, 71
(window groups); BUG-55 (grammars); of BUG-07 and 37 the fenced frees, of BUG-11 the deadlines, of
BUG-61 the bound on overtaking (adapters). BUG-25 and 27 are golden traces G14 and G2, BUG-53's table is G18.
"""

from __future__ import annotations

from collections import Counter
from itertools import count

import pytest

from engine_core.messages import FinishReason
from engine_core.scheduler.constraints.cascade import CommonPrefix
from engine_core.scheduler.constraints.chunking import ChunkLimit
from tests.engine_core.scheduler.scenario_helpers import (
    OneAdapter,
    Park,
    SitOut,
    abort_all,
    create_lower_first,
    foretell,
    other_than,
    propose,
    run_to_end,
)
from tests.engine_core.scheduler.scheduler_helpers import Harness, create_request, create_scheduler

# ------------------------------------------- requests that can never run, livelocks


def test_bug01_a_prompt_that_fits_no_pool_is_refused_and_the_queue_goes_on() -> None:
    h = Harness(create_scheduler(num_blocks=5, max_model_len=160))
    h.add("small", 5, 2)
    with pytest.raises(ValueError, match="KV pool 80"):
        h.scheduler.add_request(create_request("BIG", 100, 2))
    h.add("behind", 5, 2)
    assert [h.step(), h.step()] == [{"small": 5, "behind": 5}, {"small": 1, "behind": 1}]
    assert h.last["small"].finish_reason is h.last["behind"].finish_reason is FinishReason.LENGTH
    abort_all(h)


def test_bug03_the_pool_bounds_prompts_whatever_the_context_claims() -> None:
    h = Harness(create_scheduler(num_blocks=8, max_model_len=2048))
    assert h.scheduler.max_prompt_tokens == 128
    with pytest.raises(ValueError, match="1 to 128"):
        h.scheduler.add_request(create_request("X", 130))
    h.add("longest", 128, 50)
    assert run_to_end(h) == [{"longest": 128}]


def test_bug05_l4_a_lone_drafting_request_ends_at_the_wall() -> None:
    h = Harness(create_scheduler(num_blocks=3, block_size=4))
    h.add("X", 8, 20)
    while h.scheduler.has_unfinished_requests():
        propose(h, 4)
        assert h.step(), "a request that is alone never waits"
    assert h.last["X"].finish_reason is FinishReason.LENGTH and 8 + len(h.token_ids["X"]) == 13
    assert h.scheduler.make_stats().num_preempted == 0
    abort_all(h)


def test_bug07_v5_a_victim_with_nothing_to_give_is_left_alone() -> None:
    # The report's frees were deferred by a fence; blocks that others hold as well are just as worthless.
    sit_out = SitOut("C")
    h = Harness(create_lower_first(num_blocks=4, block_size=4, constraints=[sit_out]))
    stem = list(range(8))
    sit_out.request_ids.clear()
    h.add("C", stem, 9, priority=5)
    h.step()
    sit_out.request_ids.add("C")
    h.add("P", [*stem, 9], 9, priority=1)
    h.add("A", 4, 9, priority=2)
    assert h.step() == {"P": 1, "A": 4} and h.free == 0
    sit_out.request_ids.clear()
    for _ in range(3):
        assert h.step() == {"P": 1}
        assert h.output is not None and h.output.preempted_req_ids == []
    # The first in line must advance, so it goes on to a victim that has something.
    assert h.step() == {"P": 1}
    assert h.output is not None and h.output.preempted_req_ids == ["C", "A"]
    abort_all(h)


def test_bug11_parked_requests_hold_no_seat() -> None:
    park = Park("G1", "G2")
    h = Harness(create_scheduler(max_num_seqs=2, constraints=[park]))
    h.add("G1", 5, 2)
    h.add("G2", 5, 2)
    h.add("A", 5, 2)
    h.add("B", 5, 2)
    assert [h.step(), h.step(), h.step()] == [{"A": 5, "B": 5}, {"A": 1, "B": 1}, {}]
    assert set(h.last) == {"A", "B"}
    park.request_ids.clear()
    assert h.step() == {"G1": 5, "G2": 5}
    abort_all(h)


# ----------------------------------------------------------------------- preemption


def test_bug13_a_victim_is_never_part_of_the_step() -> None:
    h = Harness(create_lower_first(num_blocks=8, max_num_batched_tokens=200))
    for request_id, priority in (("1", 3), ("2", 4), ("3", 5)):
        h.add(request_id, 15, 9, priority=priority)
    h.step()
    for request_id, priority in (("4", 1), ("5", 2)):
        h.add(request_id, 16, 9, priority=priority)
    assert h.step() == {"1": 1, "2": 1, "3": 1, "4": 16, "5": 16}
    scheduled = h.schedule()
    assert h.output is not None and h.output.preempted_req_ids == ["3"]
    assert scheduled == {"4": 1, "5": 1, "1": 1, "2": 1} and h.output.total_num_scheduled_tokens == 4
    assert [request.request_id for request in h.scheduler.running] == ["4", "5", "1", "2"]
    h.update()
    abort_all(h)


def test_bug13_nobody_is_skipped_because_a_victim_left_the_list() -> None:
    sit_out = SitOut()
    h = Harness(create_lower_first(num_blocks=5, full_prompt_gate=False, constraints=[sit_out, ChunkLimit(15)]))
    h.add("A", 64, 5, priority=9)
    assert h.step() == {"A": 15}
    h.add("B", 15, 5, priority=0)
    assert h.step() == {"A": 15, "B": 15}
    h.add("C", 1, 5, priority=1)
    assert h.step() == {"B": 1, "A": 15, "C": 1} and h.free == 0
    sit_out.request_ids.add("A")
    assert h.step() == {"B": 1, "C": 1}
    assert h.output is not None and h.output.preempted_req_ids == ["A"]
    abort_all(h)


def test_bug15_p1c_blocks_of_a_victim_that_were_never_written_are_not_found() -> None:
    h = Harness(create_lower_first(num_blocks=8, block_size=4, full_prompt_gate=False, long_prefill_token_threshold=8))
    h.add("V", 32, 4, priority=5)
    assert h.step() == {"V": 8}
    h.add("H", 8, 20, priority=0)
    assert h.step() == {"V": 8, "H": 8}
    assert h.step() == {"H": 1}
    assert h.output is not None and h.output.preempted_req_ids == ["V"]
    h.abort("H")
    h.step()
    (resumed,) = h.output.scheduled_new_reqs
    assert (resumed.request_id, resumed.num_computed_tokens) == ("V", 16)
    run_to_end(h)  # the runner would notice a read of what was never written


@pytest.mark.parametrize(("depth", "num_drafts"), [(2, 0), (3, 0), (4, 0), (2, 3), (3, 3)])
def test_bug17_tokens_in_flight_of_preempted_requests_come_once_and_in_order(depth: int, num_drafts: int) -> None:
    h = Harness(create_scheduler(num_blocks=20, block_size=4, max_num_seqs=8, max_steps_in_flight=depth))
    prompts = {str(i): [i, *range(7)] for i in range(8)}
    num_parked = 0
    waiting = list(prompts.items())
    for index in count():
        if waiting and index % 2 == 0:
            h.add(*waiting.pop(0), 24)
        if not h.scheduler.has_unfinished_requests():
            break
        propose(h, num_drafts)
        scheduled = h.schedule()
        num_parked += len(h.scheduler.parked)
        if not scheduled or len(h.in_flight) >= depth:
            h.update()
    assert num_parked > 0
    run_to_end(h)
    assert h.token_ids == {request_id: foretell(prompt, 24) for request_id, prompt in prompts.items()}


def test_bug21_a_preempted_request_does_not_pass_an_older_one_that_never_ran() -> None:
    park = Park("A")
    h = Harness(create_lower_first(num_blocks=4, block_size=4, constraints=[park]))
    h.add("A", 4, 3, priority=5)
    h.add("B", 7, 9, priority=5)
    assert h.step() == {"B": 7}
    h.add("O", 7, 6, priority=0)
    assert h.step() == {"B": 1, "O": 7}
    assert h.step() == {"O": 1}
    assert h.output is not None and h.output.preempted_req_ids == ["B"]
    park.request_ids.clear()
    # B does not fit. If it stood before A, it would hold up A too.
    assert h.step() == {"O": 1, "A": 4}
    abort_all(h)


def test_bug23_no_row_reaches_past_what_is_known() -> None:
    h = Harness(create_scheduler(num_blocks=6, block_size=4, max_num_seqs=8))
    stem = list(range(12))
    for i in range(8):
        h.add(str(i), [*stem, 20 + i], 8)
    num_hits_of_resumed = 0
    while h.scheduler.has_unfinished_requests():
        h.schedule()
        assert h.output is not None
        for request_id, start, num_tokens in zip(h.output.req_ids, h.output.starts, h.output.token_counts, strict=True):
            assert start + num_tokens <= h.scheduler.requests[request_id].num_tokens
        num_hits_of_resumed += sum(new.num_computed_tokens for new in h.output.scheduled_new_reqs if new.resumed)
        h.update()
    assert num_hits_of_resumed > 0
    abort_all(h)


# ------------------------------------------------------- prefix cache and block pool


def test_bug29_k7a_a_block_of_rejected_drafts_is_not_registered() -> None:
    h = Harness(create_scheduler(block_size=4))
    prompt = list(range(6))
    truth = foretell(prompt, 9)
    wrong = other_than(truth[1])
    h.add("X", prompt, 9)
    h.step()
    h.scheduler.set_draft_token_ids({"X": [wrong, 1, 2]})
    assert h.step() == {"X": 4} and h.token_ids["X"] == truth[:2]
    index = h.scheduler.kv_cache.pool.index
    assert list(index.values()) == h.table("X")[:1]
    h.add("draft", [*prompt, truth[0], wrong, 1])
    assert h.step() == {"X": 1, "draft": 5}  # one block hit; X writes its eighth token
    h.add("real", [*prompt, truth[0], truth[1], 1])
    assert h.step() == {"X": 1, "real": 1}
    assert [block for block in index.values() if block in h.table("X")] == h.table("X")[:2]
    abort_all(h)


def test_bug31_k9_twins_of_one_digest_are_evicted_one_by_one() -> None:
    h = Harness(create_scheduler(num_blocks=7))
    prompt = list(range(40))
    text = [*prompt, *foretell(prompt, 12)]
    h.add("A", prompt, 12)
    h.add("B", prompt, 12)
    for _ in range(10):
        h.step()
    assert (h.table("A"), h.table("B")) == ([1, 2, 3, 5], [1, 2, 4, 6])
    h.abort("B")  # its third block is the twin that the index does not name
    h.add("takes the twin", 33)
    h.step()
    h.add("C", [*text[:48], 0], 1)
    assert h.schedule()["C"] == 1, "the other twin still serves"
    h.update()
    run_to_end(h)
    h.add("takes all", 112)
    h.step()
    h.add("D", [*text[:48], 0], 1)
    assert h.step() == {"D": 49}
    abort_all(h)


def test_bug31_k9_a_twin_without_an_owner_leaves_the_index_to_the_living_one() -> None:
    h = Harness(create_scheduler(num_blocks=6))
    prompt = list(range(32))
    h.add("A", prompt)
    h.step()
    h.add("B", prompt, 20)  # computes the second block again (K5)
    assert h.step() == {"B": 16} and h.table("B") == [1, 3]
    h.add("takes the old twin", 48)
    h.step()
    h.add("C", [*prompt, 5], 2)
    assert h.step() == {"B": 1, "C": 1} and h.table("C")[:2] == [1, 3]
    abort_all(h)


def test_bug37_a_common_prefix_is_not_told_by_counting_owners() -> None:
    # The report's owners beyond the step were retained; here they sit the step out.
    sit_out = SitOut()
    h = Harness(create_scheduler(constraints=[sit_out, CommonPrefix(16)]))
    stem = list(range(32))
    sharing = [f"s{i}" for i in range(8)]
    for i, request_id in enumerate(sharing):
        h.add(request_id, [*stem, 40 + i], 9)
    h.step()
    others = [f"o{i}" for i in range(7)]
    for request_id in others:
        h.add(request_id, 33, 9)
    h.step()
    sit_out.request_ids.update(others)
    assert set(h.step()) == set(sharing)
    assert h.output is not None and h.output.num_common_prefix_blocks == 2
    sit_out.request_ids = set(sharing[1:])
    assert set(h.step()) == {"s0", *others}
    assert h.scheduler.kv_cache.pool.ref_counts[h.table("s0")[0]] == len(h.output.req_ids)
    assert h.output.num_common_prefix_blocks == 0
    abort_all(h)


def test_bug39_p7_without_caching_the_last_freed_is_the_first_taken() -> None:
    h = Harness(create_scheduler(num_blocks=6, enable_prefix_caching=False))
    prompt = list(range(40))
    h.add("A", prompt, 2)
    h.add("B", 33, 1)
    h.step()
    assert h.free_order == [4, 5, 6]
    h.step()
    assert h.free_order == [1, 2, 3, 4, 5, 6]
    h.add("C", prompt, 2)
    assert h.step() == {"C": 40}
    assert h.table("C") == [1, 2, 3]
    assert h.scheduler.requests["C"].block_digests == [] and not h.scheduler.kv_cache.pool.index
    abort_all(h)


def test_bug41_shared_blocks_are_counted_once() -> None:
    h = Harness(create_scheduler(num_blocks=8))
    stem = list(range(32))
    for i in range(3):
        h.add(str(i), [*stem, i], 3)
    assert h.step() == {"0": 33, "1": 1, "2": 1} and h.free == 3
    run_to_end(h)
    assert h.free == 8 and sorted(h.free_order) == list(range(1, 9))


# -------------------------------------------------- asynchronous scheduling, abort, finish


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_bug49_a_cancelled_prompt_brings_no_token(depth: int) -> None:
    h = Harness(create_scheduler(max_num_batched_tokens=8, max_num_seqs=8, max_steps_in_flight=depth))
    h.add("X", 12, 3)
    assert h.schedule() == {"X": 8}
    if depth == 1:
        h.update()
    assert h.schedule() == {"X": 4}
    h.abort("X")
    assert h.free == 64 and h.last["X"].new_token_ids == []
    while h.in_flight:
        h.update()
    assert h.last["X"].finish_reason is FinishReason.ABORT and h.token_ids["X"] == []
    abort_all(h)


@pytest.mark.parametrize(("is_right", "num_drafts"), [(True, [0, 1]), (False, [0, 1, 0])])
def test_bug51_sd8_drafts_stop_where_the_request_will(is_right: bool, num_drafts: list[int]) -> None:
    h = Harness(create_scheduler(block_size=4))
    prompt = list(range(6))
    truth = foretell(prompt, 3)
    h.add("X", prompt, 3)
    counts = []
    while h.scheduler.has_unfinished_requests():
        h.scheduler.set_draft_token_ids({"X": [truth[1] if is_right else other_than(truth[1]), 0, 0]})
        assert h.step()
        assert h.output is not None
        counts.append(len(h.output.scheduled_spec_decode_tokens.get("X", [])))
    assert counts == num_drafts and h.token_ids["X"] == truth
    abort_all(h)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
@pytest.mark.parametrize("max_tokens", [1, 2, 4, 9])
def test_bug51_p9_no_step_after_a_certain_end(depth: int, max_tokens: int) -> None:
    h = Harness(create_scheduler(block_size=4, max_steps_in_flight=depth))
    h.add("X", 6, max_tokens)
    assert run_to_end(h) == [{"X": 6}, *[{"X": 1}] * (max_tokens - 1)]
    assert h.runner.num_executed_steps == max_tokens


def test_bug53_p3_min_tokens_keeps_nobody_alive_beyond_the_length() -> None:
    every_id = frozenset(range(16))
    h = Harness(create_scheduler())
    h.add("X", 5, 3, min_tokens=5, eos_token_ids=every_id)
    h.add("Y", 5, 3, min_tokens=2, eos_token_ids=every_id)
    run_to_end(h)
    assert (len(h.token_ids["X"]), h.last["X"].finish_reason) == (3, FinishReason.LENGTH)
    assert (len(h.token_ids["Y"]), h.last["Y"].finish_reason) == (2, FinishReason.STOP)


@pytest.mark.parametrize("depth", [1, 2])
def test_bug57_gauges_return_to_zero_although_a_step_was_in_flight(depth: int) -> None:
    h = Harness(create_scheduler(max_num_seqs=2, max_steps_in_flight=depth))
    for request_id in "ABC":
        h.add(request_id, 20, 9)
    h.schedule()
    h.abort("A", "B", "C")
    stats = h.scheduler.make_stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    h.update()
    assert h.scheduler.make_stats().num_generation_tokens == 0
    assert h.step() == {}
    abort_all(h)


# ------------------------------------------------------------------- order, adapters


def test_bug59_parked_requests_come_back_in_their_order() -> None:
    park = Park("R1", "R2")
    h = Harness(create_scheduler(max_num_seqs=1, constraints=[park]))
    for request_id in ("R1", "R2", "R3", "R4"):
        h.add(request_id, 5, 2)
    assert h.step() == {"R3": 5}
    park.request_ids.clear()
    assert run_to_end(h) == [{"R3": 1}, *({id_: n} for id_ in ("R1", "R2", "R4") for n in (5, 1))]


def test_bug59_p2b_a_preempted_request_is_not_overtaken_by_a_younger_parked_one() -> None:
    adapters = OneAdapter({"A": "l1", "P": "l1", "B": "l2"})
    h = Harness(create_scheduler(num_blocks=6, block_size=4, constraints=[adapters]))
    h.add("A", 7, 9)
    h.add("P", 7, 16)
    h.add("B", 7, 9)
    assert h.step() == {"A": 7, "P": 7}
    preempted: list[str] = []
    while "A" not in h.last:
        h.step()
        assert h.output is not None
        preempted += h.output.preempted_req_ids
    assert preempted == ["P"]
    assert set(h.step()) == {"P"}
    abort_all(h)


def test_bug61_q4_an_adapter_that_must_wait_holds_up_nobody() -> None:
    adapters = OneAdapter({"first": "l1", "other": "l2", **{f"l1-{i}": "l1" for i in range(5)}})
    h = Harness(create_scheduler(constraints=[adapters]))
    for request_id in ("first", "other", "base", *(f"l1-{i}" for i in range(5))):
        h.add(request_id, 5, 2)
    assert set(h.step()) == {"first", "base", *(f"l1-{i}" for i in range(5))}
    assert "other" not in h.step()
    assert h.step() == {"other": 5}
    abort_all(h)


def test_bug63_requests_equal_in_everything_keep_their_order() -> None:
    h = Harness(create_lower_first(max_num_seqs=1))
    for i in (3, 1, 2, 0):
        h.add(f"child-{i}", range(5), 1, priority=7, arrival_time=1.0, seed=4)
    order = [next(iter(step)) for step in run_to_end(h)]
    assert order == ["child-3", "child-1", "child-2", "child-0"]
    assert Counter(map(tuple, h.token_ids.values())) == {tuple(foretell(range(5), 1, seed=4)): 4}
