"""Traces taken from vLLM's own scheduler (scheduler.md appendix A), where our rules agree with it."""

from __future__ import annotations

from engine_core.messages import FinishReason
from tests.engine_core.scheduler.scheduler_helpers import Harness, create_scheduler


def test_g1_chunks_then_decodes() -> None:
    h = Harness(create_scheduler(num_blocks=10, max_num_batched_tokens=20, max_num_seqs=4))
    h.add("A", 50, 4)
    h.add("B", 10, 4)
    steps, free = [], []
    for _ in range(6):
        steps.append(h.schedule())
        h.update()
        free.append(h.free)
    assert steps == [{"A": 20}, {"A": 20}, {"A": 10, "B": 10}, *[{"A": 1, "B": 1}] * 3]
    assert free == [8, 7, 5, 5, 5, 10]
    assert {id_: out.finish_reason for id_, out in h.last.items()} == dict.fromkeys("AB", FinishReason.LENGTH)


def test_g2_k5_the_last_token_is_always_computed() -> None:
    h = Harness(create_scheduler(num_blocks=10))
    prompt = list(range(33))
    h.add("first", prompt)
    h.drain()
    computed = []
    for length in (33, 32, 31, 17, 16):
        h.add(f"p{length}", prompt[:length])
        computed.append(sum(sum(step.values()) for step in h.drain()))
        assert h.last[f"p{length}"].num_cached_tokens == length - computed[-1]
    assert computed == [1, 16, 15, 1, 16]


def test_g3_preempted_request_resumes_through_the_prefix_cache() -> None:
    h = Harness(create_scheduler(num_blocks=4, block_size=4))
    h.add("A", 7, 6)
    h.add("B", 7, 6)
    assert [h.step() for _ in range(2)] == [{"A": 7, "B": 7}, {"A": 1, "B": 1}]
    assert h.step() == {"A": 1}
    assert h.output is not None and h.output.preempted_req_ids == ["B"]
    assert h.free == 1
    assert [h.step() for _ in range(3)] == [{"A": 1}] * 3
    assert "A" in h.last
    assert h.step() == {"B": 5}
    (resumed,) = h.output.scheduled_new_reqs
    assert resumed.resumed and resumed.num_computed_tokens == 4 and len(resumed.token_ids) == 9
    assert [h.step() for _ in range(3)] == [{"B": 1}] * 3
    assert h.free == 4 and len(h.token_ids["A"]) == len(h.token_ids["B"]) == 6


def test_g4_a11_equal_prompts_admitted_together_share_blocks() -> None:
    h = Harness(create_scheduler())
    prompt = list(range(40))
    h.add("A", prompt, 2)
    h.add("B", prompt, 2)
    assert h.schedule() == {"A": 40, "B": 8}
    assert (h.table("A"), h.table("B")) == ([1, 2, 3], [1, 2, 4])
    h.update()
    h.drain()


def test_g6_r7_length_ends_where_the_pool_does() -> None:
    h = Harness(create_scheduler(num_blocks=5))
    h.add("X", 60, 60)
    h.drain()
    assert h.last["X"].finish_reason is FinishReason.LENGTH
    assert 60 + len(h.token_ids["X"]) == 81


def test_g7_p5_free_order() -> None:
    h = Harness(create_scheduler(num_blocks=6))
    prompt = list(range(40))
    h.add("A", prompt)
    h.step()
    assert h.free_order == [3, 4, 5, 6, 2, 1]
    h.add("B", 16)
    h.step()
    assert h.free_order == [4, 5, 6, 2, 1, 3]
    h.add("C", prompt)
    assert h.step() == {"C": 8}
    assert h.free_order == [4, 5, 6, 3, 2, 1]


def test_g10_b3_threshold_caps_both_phases() -> None:
    h = Harness(create_scheduler(max_num_batched_tokens=40, long_prefill_token_threshold=15, max_num_seqs=8))
    h.add("P1", 100)
    h.add("P2", 100)
    h.add("P3", 5, 2)
    steps = [h.step() for _ in range(4)]
    assert steps == [{"P1": 15, "P2": 15, "P3": 5}, {"P1": 15, "P2": 15, "P3": 1}, *[{"P1": 15, "P2": 15}] * 2]


def test_g11_q3_nothing_overtakes_a_head_that_does_not_fit() -> None:
    h = Harness(create_scheduler(num_blocks=6))
    h.add("A", 60, 3)
    h.step()
    h.add("B", 50, 2)
    h.add("C", 5, 2)
    assert [h.step() for _ in range(3)] == [{"A": 1}, {"A": 1}, {"B": 50, "C": 5}]


def test_g12_f_abort_with_a_chunk_in_flight() -> None:
    h = Harness(create_scheduler(num_blocks=10, max_num_batched_tokens=20, max_num_seqs=8))
    h.add("A", 30, 2)
    h.add("B", 30, 2)
    h.add("C", 30, 2)
    assert h.schedule() == {"A": 20}
    h.abort("A", "C")
    assert h.free == 10
    h.update()
    assert h.token_ids["A"] == []
    assert h.schedule() == {"B": 20}
    assert h.output is not None and h.output.finished_req_ids == ["A", "C"]
    h.update()
    h.drain()


def test_g13_b8_watermark_only_beside_running_requests() -> None:
    h = Harness(create_scheduler(num_blocks=19, watermark=0.2))
    h.add("A", 120, 3)
    h.step()
    h.add("B", 120, 2)
    assert [h.step() for _ in range(3)] == [{"A": 1}, {"A": 1}, {"B": 120}]


def test_g14_b2_max_num_seqs_bounds_running() -> None:
    h = Harness(create_scheduler(max_num_seqs=2))
    for request_id in "ABC":
        h.add(request_id, 10, 2)
    assert h.drain() == [{"A": 10, "B": 10}, {"A": 1, "B": 1}, {"C": 10}, {"C": 1}]


def test_g20_k11_a_hit_ends_at_the_first_missing_block() -> None:
    h = Harness(create_scheduler(num_blocks=8, block_size=4))
    prompt = list(range(16))
    h.add("A", prompt)
    h.step()
    assert h.free_order == [5, 6, 7, 8, 4, 3, 2, 1]
    h.add("X", 24)
    h.step()
    assert h.free_order == [2, 1, 3, 4, 8, 7, 6, 5]
    h.add("again", [*prompt, 7])
    assert h.schedule() == {"again": 9}
    assert h.table("again")[:2] == [1, 2]
    h.update()


def test_p4_a_preempted_request_comes_back_before_a_younger_one() -> None:
    h = Harness(create_scheduler(num_blocks=4, block_size=4))
    h.add("A", 7, 6)
    h.add("B", 7, 6)
    for _ in range(3):
        h.step()
    h.add("N", 1, 2)
    for _ in range(3):
        assert h.step() == {"A": 1}
    assert h.step() == {"B": 5, "N": 1}
    h.drain()
