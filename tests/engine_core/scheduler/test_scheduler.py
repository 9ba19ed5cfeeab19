"""One test a rule; the rule's id (scheduler.md) is in the name."""

from __future__ import annotations

import gc

import pytest

from engine_core.messages import FinishReason
from engine_core.request import RequestStatus
from engine_core.scheduler.output import ModelRunnerOutput
from engine_core.stats import SchedulerStats
from tests.engine_core.scheduler.scheduler_helpers import Harness, create_request, create_scheduler


def preempt_b() -> Harness:
    """Return a harness in which B has just been preempted by A (golden trace G3, step 3)."""
    h = Harness(create_scheduler(num_blocks=4, block_size=4))
    h.add("A", 7, 6)
    h.add("B", 7, 6)
    for _ in range(3):
        h.step()
    return h


# ---------------------------------------------------------------------- adding


@pytest.mark.parametrize(("num_blocks", "max_model_len", "longest"), [(5, 160, 80), (5, 80, 79), (64, 100, 99)])
def test_r6_n1_the_longest_prompt(num_blocks: int, max_model_len: int, longest: int) -> None:
    h = Harness(create_scheduler(num_blocks=num_blocks, max_model_len=max_model_len))
    assert h.scheduler.max_prompt_tokens == longest
    h.add("fits", longest, 5)
    with pytest.raises(ValueError, match=f"1 to {longest} tokens.*not {longest + 1}"):
        h.scheduler.add_request(create_request("long", longest + 1))
    h.drain()
    assert h.last["fits"].finish_reason is FinishReason.LENGTH and len(h.token_ids["fits"]) == 1


def test_bug01_g5_a_prompt_that_fits_no_pool_does_not_block_the_queue() -> None:
    h = Harness(create_scheduler(num_blocks=5, max_model_len=160))
    with pytest.raises(ValueError, match="KV pool 80"):
        h.scheduler.add_request(create_request("BIG", 100, 2))
    h.add("small", 5, 2)
    assert h.drain() == [{"small": 5}, {"small": 1}]


def test_r6_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^A prompt .* not 0\.$"):
        create_scheduler().add_request(create_request("r", []))


def test_r6d_ids_are_unique_among_the_living() -> None:
    h = Harness(create_scheduler())
    h.add("r", 5)
    with pytest.raises(ValueError, match=r"^Request id 'r' is in use; choose another\.$"):
        h.scheduler.add_request(create_request("r", 5))
    h.drain()
    h.scheduler.add_request(create_request("r", 5))


def test_the_clients_prompt_is_not_touched() -> None:
    h = Harness(create_scheduler())
    message = create_request("r", 5, 3)
    h.scheduler.add_request(message)
    h.token_ids["r"] = []
    h.drain()
    assert len(message.prompt_token_ids) == 5


# -------------------------------------------------------------------- schedule


def test_r4_s1_running_before_waiting_and_budget_is_shared() -> None:
    h = Harness(create_scheduler(max_num_batched_tokens=10, max_num_seqs=8))
    h.add("A", 4, 3)
    h.add("B", 20, 2)
    assert h.drain() == [{"A": 4, "B": 6}, {"A": 1, "B": 9}, {"A": 1, "B": 5}, {"B": 1}]


def test_r5_a_chunk_that_ends_before_the_last_token_samples_nothing() -> None:
    h = Harness(create_scheduler(max_num_batched_tokens=64))
    h.add("A", 65, 1)
    h.step()
    assert h.token_ids["A"] == [] and "A" not in h.last
    h.step()
    assert len(h.token_ids["A"]) == 1


def test_r5_a_runner_that_samples_too_early_is_noticed() -> None:
    h = Harness(create_scheduler(max_num_batched_tokens=64))
    h.add("A", 65, 1)
    output = h.scheduler.schedule(0.0)
    with pytest.raises(AssertionError):
        h.scheduler.update_from_output(output, ModelRunnerOutput.of(output, {"A": [1]}))


def test_r3_counters_advance_at_the_end_of_schedule() -> None:
    h = Harness(create_scheduler())
    h.add("A", 20, 3)
    h.schedule()
    assert h.scheduler.requests["A"].num_computed_tokens == 20
    h.update()
    request = h.scheduler.requests["A"]
    assert (request.num_computed_tokens, request.num_tokens) == (20, 21)


def test_i27_without_results_a_second_schedule_finds_nothing_to_do() -> None:
    h = Harness(create_scheduler())
    h.add("A", 20, 3)
    first = h.scheduler.schedule(0.0)
    for _ in range(4):
        assert h.scheduler.schedule(0.0).num_scheduled_tokens == {}
    assert h.scheduler.requests["A"].num_computed_tokens == 20
    (output,) = h.scheduler.update_from_output(first, h.runner.execute(first)).outputs
    assert output.finish_reason is None


def test_o1_new_requests_carry_everything_and_cached_ones_only_what_changed() -> None:
    h = Harness(create_scheduler(block_size=4))
    h.add("A", [5, 6, 7], 4, seed=3)
    h.step()
    assert h.output is not None
    (new,) = h.output.scheduled_new_reqs
    assert (new.token_ids, new.num_prompt_tokens, new.block_ids) == ([5, 6, 7], 3, [1])
    assert (new.num_computed_tokens, new.resumed, new.sampling_params.seed) == (0, False, 3)
    columns = []
    for _ in range(3):
        h.step()
        cached = h.output.scheduled_cached_reqs
        columns.append((cached.req_ids, cached.new_block_ids, cached.num_computed_tokens))
    assert columns == [(["A"], [[]], [3]), (["A"], [[2]], [4]), (["A"], [[]], [5])]


def test_o8_an_output_does_not_change_afterwards() -> None:
    h = Harness(create_scheduler(block_size=4))
    h.add("A", 3, 9)
    first = h.scheduler.schedule(0.0)
    (new,) = first.scheduled_new_reqs
    tokens = list(new.token_ids)
    h.scheduler.update_from_output(first, h.runner.execute(first))
    for _ in range(5):
        h.step()
    assert new.token_ids == tokens and new.block_ids == [1]


def test_o6_resumed_requests_carry_their_outputs() -> None:
    h = preempt_b()
    while not (h.output and h.output.scheduled_new_reqs):
        h.step()
    (new,) = h.output.scheduled_new_reqs
    assert new.request_id == "B" and new.resumed
    assert new.token_ids[7:] == h.token_ids["B"][:2] and new.num_prompt_tokens == 7
    h.drain()


# ------------------------------------------------------- admission and blocks


def test_a5_bug_two_long_prompts_do_not_start_what_cannot_fit_together() -> None:
    h = Harness(create_scheduler(num_blocks=6, block_size=4, max_chunk_size=4))
    h.add("A", 16)
    h.add("B", 16)
    assert h.step() == {"A": 4}
    steps = h.drain()
    assert steps == [{"A": 4}, {"A": 4}, {"A": 4}, *[{"B": 4}] * 4]


def test_l3_running_requests_ignore_watermark_and_reservations() -> None:
    h = Harness(create_scheduler(num_blocks=4, block_size=4, watermark=0.5))
    h.add("A", 4, 13)
    h.drain()
    assert len(h.token_ids["A"]) == 13


def test_b8_a_lone_request_may_use_the_watermark() -> None:
    h = Harness(create_scheduler(num_blocks=4, block_size=4, watermark=0.5))
    h.add("A", 16, 1)
    assert h.drain() == [{"A": 16}]


def test_a9_i28_a_refused_head_leaves_no_trace() -> None:
    h = Harness(create_scheduler(num_blocks=6))
    stem = list(range(32))
    h.add("first", stem)
    h.drain()
    h.add("A", 60, 9)
    h.step()
    order, counts = h.free_order, list(h.scheduler.kv_cache.pool.ref_counts)
    h.add("B", [*stem, *range(32, 64)], 2)
    for _ in range(2):
        assert h.step() == {"A": 1}
    assert (h.free_order, h.scheduler.kv_cache.pool.ref_counts) == (order, counts)
    assert h.scheduler.make_stats().num_prefix_queries == 32 + 60


def test_b2_bug25_seats_are_only_tested_at_admission() -> None:
    h = Harness(create_scheduler(max_num_seqs=2))
    for request_id in "ABC":
        h.add(request_id, 4, 5)
    h.step()
    for _ in range(4):
        assert h.step() == {"A": 1, "B": 1}
    assert h.step() == {"C": 4}


def test_a2_bug23_a_resumed_request_is_scheduled_after_its_hit() -> None:
    h = Harness(create_scheduler(num_blocks=6, block_size=4, max_num_seqs=8))
    stem = list(range(8))
    for i in range(8):
        h.add(str(i), [*stem, 20 + i, 30 + i], 8)
    num_preempted = 0
    while h.scheduler.has_unfinished_requests():
        h.step()
        assert h.output is not None
        num_preempted += len(h.output.preempted_req_ids)
        for new in h.output.scheduled_new_reqs:
            count = h.output.num_scheduled_tokens[new.request_id]
            assert new.num_computed_tokens + count <= len(new.token_ids)
    assert num_preempted > 0


# ------------------------------------------------------------------ preemption


def test_v2_v3_the_tail_is_the_victim_even_if_it_asks_itself() -> None:
    h = Harness(create_scheduler(num_blocks=4, block_size=4))
    h.add("A", 6, 9)
    h.add("B", 8, 6)
    h.step()
    assert h.step() == {"A": 1}
    assert h.output is not None and h.output.preempted_req_ids == ["B"]
    h.drain()


def test_v6_effects_of_a_preemption() -> None:
    h = preempt_b()
    request = h.scheduler.requests["B"]
    assert request.status is RequestStatus.PREEMPTED
    assert (request.num_computed_tokens, request.num_registered_blocks, request.block_ids) == (0, 0, [])
    assert request.num_preemptions == 1 and request.num_tokens == 9
    assert "B" in h.scheduler.waiting
    h.drain()


def test_v8_nobody_is_admitted_in_a_step_that_preempted() -> None:
    h = Harness(create_scheduler(num_blocks=4, block_size=4))
    h.add("A", 7, 6)
    h.add("B", 7, 6)
    h.step()
    h.step()
    h.add("N", 1, 1)
    assert h.step() == {"A": 1}
    assert h.free == 1
    h.drain()


def test_v1_no_preemption_for_want_of_tokens_or_seats() -> None:
    h = Harness(create_scheduler(max_num_batched_tokens=3, max_num_seqs=3))
    for request_id in "ABCD":
        h.add(request_id, 3, 4)
    for step in h.drain():
        assert step
    assert h.scheduler.make_stats().num_preempted == 0


def test_v11_i13_the_oldest_always_advances() -> None:
    h = Harness(create_scheduler(num_blocks=3, block_size=2, max_num_seqs=8))
    for i in range(6):
        h.add(str(i), 2, 4)
    for oldest in range(6):
        while str(oldest) not in h.last:
            assert str(oldest) in h.step()


def test_bug05_r7_a_lone_request_ends_at_the_wall() -> None:
    h = Harness(create_scheduler(num_blocks=3, block_size=4))
    h.add("X", 8, 20)
    h.drain()
    assert h.last["X"].finish_reason is FinishReason.LENGTH and 8 + len(h.token_ids["X"]) == 13


def test_r7_the_context_ends_a_request() -> None:
    h = Harness(create_scheduler(max_model_len=10))
    h.add("X", 7, 20)
    h.drain()
    assert 7 + len(h.token_ids["X"]) == 10


# --------------------------------------------------------------------- results


def test_u5_u6_the_stopping_token_is_reported_with_its_reason() -> None:
    h = Harness(create_scheduler())
    every_id = frozenset(range(16))
    h.add("eos", 5, 9, eos_token_ids=every_id)
    h.add("stop", 5, 9, stop_token_ids=every_id)
    h.add("both", 5, 9, eos_token_ids=every_id, stop_token_ids=every_id)
    h.add("ignore", 5, 3, eos_token_ids=every_id, ignore_eos=True)
    h.drain()
    assert [len(h.token_ids[id_]) for id_ in ("eos", "stop", "both", "ignore")] == [1, 1, 1, 3]
    assert h.last["eos"].stop_token_id is None and h.last["both"].stop_token_id is None
    assert h.last["stop"].stop_token_id == h.token_ids["stop"][0]
    reasons = [h.last[id_].finish_reason for id_ in ("eos", "stop", "both", "ignore")]
    assert reasons == [FinishReason.STOP] * 3 + [FinishReason.LENGTH]


def test_u5_tokens_after_a_stop_are_dropped() -> None:
    h = Harness(create_scheduler())
    h.add("A", 5, 9, stop_token_ids=frozenset({7}))
    output = h.scheduler.schedule(0.0)
    (last,) = h.scheduler.update_from_output(output, ModelRunnerOutput.of(output, {"A": [3, 7, 4]})).outputs
    assert (last.new_token_ids, last.stop_token_id) == ([3, 7], 7)


def test_u13_a_failed_request_ends_alone_and_its_kv_is_not_reused() -> None:
    h = Harness(create_scheduler(block_size=4))
    prompt = list(range(12))
    h.add("bad", prompt, 5)
    h.add("good", 6, 3)
    h.runner.failing_ids.add("bad")
    h.step()
    assert h.last["bad"].finish_reason is FinishReason.ERROR
    assert h.last["bad"].error == "The logits are not finite."
    h.add("again", prompt, 2)
    assert h.step() == {"good": 1, "again": 12}
    h.drain()
    assert len(h.token_ids["good"]) == 3 and len(h.token_ids["again"]) == 2


def test_u13_a_failing_prompt_chunk_ends_its_request() -> None:
    h = Harness(create_scheduler(max_num_batched_tokens=64))
    h.add("bad", 100, 5)
    h.runner.failing_ids.add("bad")
    h.step()
    assert h.last["bad"].finish_reason is FinishReason.ERROR
    h.drain()


def test_num_cached_tokens_is_told_and_belongs_to_the_first_admission() -> None:
    h = Harness(create_scheduler())
    prompt = list(range(33))
    h.add("A", prompt)
    h.drain()
    h.add("B", prompt, 2)
    h.drain()
    assert (h.last["A"].num_cached_tokens, h.last["B"].num_cached_tokens) == (0, 32)
    h = preempt_b()
    h.drain()
    assert h.last["B"].num_cached_tokens == 0


# ----------------------------------------------------------------------- abort


def test_f_abort_in_every_state_ends_exactly_once() -> None:
    h = preempt_b()
    h.add("W", 5, 2)
    h.abort("A", "B", "W", "never seen", "A")
    assert {id_: out.finish_reason for id_, out in h.last.items()} == dict.fromkeys("ABW", FinishReason.ABORT)
    assert h.free == 4 and not h.scheduler.has_unfinished_requests() and h.scheduler.has_pending_output()
    h.abort("A", "B", "W")
    assert h.step() == {}
    assert sorted(h.reported_finished) == ["A", "B", "W"]
    assert not h.scheduler.has_pending_output() and not h.runner.rows


def test_u2_u3_an_abort_beats_a_finish_of_the_same_step() -> None:
    h = Harness(create_scheduler())
    h.add("A", 5, 1)
    h.add("B", 5, 1)
    h.schedule()
    h.abort("A")
    h.update()
    assert h.last["A"].finish_reason is FinishReason.ABORT and h.token_ids["A"] == []
    assert h.last["B"].finish_reason is FinishReason.LENGTH
    h.drain()


def test_u3_a_result_does_not_reach_a_new_request_with_an_old_id() -> None:
    h = Harness(create_scheduler())
    h.add("A", 5, 3)
    h.schedule()
    h.scheduler.abort_requests(["A"])
    h.add("A", 6, 3)
    h.update()
    assert h.token_ids["A"] == [] and h.scheduler.requests["A"].num_tokens == 6
    assert h.step() == {"A": 6}


def test_f_an_abort_of_a_running_request_lets_the_next_one_in() -> None:
    h = Harness(create_scheduler(max_num_seqs=1))
    h.add("A", 5, 9)
    h.add("B", 5, 2)
    h.step()
    h.abort("A")
    assert h.drain() == [{"B": 5}, {"B": 1}]


# ----------------------------------------------------------------------- stats


def test_t1_stats_of_a_step() -> None:
    h = Harness(create_scheduler(num_blocks=4, block_size=4, max_num_seqs=2))
    h.add("A", 7, 6)
    h.add("B", 7, 6)
    h.add("C", 3, 2)
    h.step()
    assert h.scheduler.make_stats(step_time_s=0.25) == SchedulerStats(
        num_running=2,
        num_waiting=1,
        num_blocks=4,
        num_free_blocks=0,
        num_scheduled_tokens=14,
        num_prompt_tokens=14,
        num_generation_tokens=2,
        num_prefix_queries=14,
        num_steps=1,
        num_step_prompt_tokens=14,
        num_step_generation_tokens=2,
        step_time_s=0.25,
    )
    h.step()
    assert h.scheduler.make_stats().num_prompt_tokens == 0
    h.step()
    stats = h.scheduler.make_stats()
    assert (stats.num_running, stats.num_waiting, stats.num_preempted) == (1, 2, 1)
    assert (stats.num_prompt_tokens, stats.num_generation_tokens) == (0, 1)


def test_t2_hits_of_resumed_requests_are_not_counted_again() -> None:
    h = preempt_b()
    h.scheduler.make_stats()
    h.drain()
    stats = h.scheduler.make_stats()
    assert (stats.num_prefix_queries, stats.num_prefix_hits) == (0, 0)
    assert (stats.num_resumed_queries, stats.num_resumed_hits) == (9, 4)
    assert stats.num_prompt_tokens == 5  # recomputed


def test_t4_bug57_gauges_return_to_zero() -> None:
    h = Harness(create_scheduler())
    for request_id in "ABC":
        h.add(request_id, 20, 9)
    h.step()
    h.abort("A", "B", "C")
    stats = h.scheduler.make_stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)


# ----------------------------------------------------------------- whole loads


def test_i22_nothing_is_left_of_finished_requests() -> None:
    h = Harness(create_scheduler(num_blocks=16, block_size=4, max_num_seqs=8))
    gc.collect()
    for i in range(100):
        h.add(str(i), 5, 3)
        h.step()
    h.drain()
    scheduler = h.scheduler
    assert not (scheduler.requests or scheduler.running or len(scheduler.waiting) or h.runner.rows)
    assert scheduler.kv_cache.num_reserved_blocks == 0
    assert gc.collect() == 0, "requests or outputs form a reference cycle"


def test_k2_prefixes_are_shared_within_a_salt_only() -> None:
    h = Harness(create_scheduler())
    prompt = list(range(33))
    for request_id, salt in (("plain", ""), ("a", "tenant a"), ("b", "tenant b")):
        h.add(request_id, prompt, cache_salt=salt)
        assert h.drain() == [{request_id: 33}]
    h.add("a again", prompt, cache_salt="tenant a")
    assert h.drain() == [{"a again": 1}]


def test_k4_a_request_that_wants_its_whole_prompt_computed_finds_nothing_but_is_found() -> None:
    h = Harness(create_scheduler())
    prompt = list(range(33))
    for request_id in ("first", "second"):
        h.add(request_id, prompt, skip_reading_prefix_cache=True)
        assert h.drain() == [{request_id: 33}]
    h.add("third", prompt)
    assert h.drain() == [{"third": 1}]
