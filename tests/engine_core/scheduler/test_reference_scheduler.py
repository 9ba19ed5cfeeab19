"""The reference scheduler against the golden traces of vLLM's own (shared/spec/scheduler.md, appendix A)."""

from __future__ import annotations

from itertools import count
from typing import Any

from tests.engine_core.scheduler.reference_scheduler import ReferenceScheduler, ReferenceStep

EOS = 99


class Play:
    """Drives a ReferenceScheduler with distinct prompts and, unless told otherwise, distinct samples."""

    def __init__(self, num_blocks: int = 64, block_size: int = 16, **overrides: Any) -> None:
        config = {"max_num_batched_tokens": 256, "max_num_seqs": 8, "max_model_len": 1024, **overrides}
        self.scheduler = ReferenceScheduler(num_blocks=num_blocks, block_size=block_size, **config)
        self.fresh = count(1000)

    def add(self, request_id: str, prompt: int | list[int], max_tokens: int, **options: Any) -> list[int]:
        tokens = [next(self.fresh) for _ in range(prompt)] if isinstance(prompt, int) else prompt
        self.scheduler.add(request_id, tokens, max_tokens=max_tokens, **options)
        return tokens

    def update(self, **sampled: list[int]) -> dict[str, tuple[list[int], str | None]]:
        rows = self.scheduler.in_flight[0]
        drawn = {i: [next(self.fresh)] for i, row in rows.items() if row.placeholders}
        return self.scheduler.update(list(rows), {**drawn, **sampled})

    def step(self, **sampled: list[int]) -> ReferenceStep:
        """Schedule a step; once the pipeline is full, or has nothing to add, process the oldest."""
        step = self.scheduler.schedule()
        in_flight = len(self.scheduler.in_flight)
        if in_flight and (not step.counts or in_flight == self.scheduler.max_steps_in_flight):
            self.update(**sampled)
        return step

    def counts(self, num_steps: int) -> list[dict[str, int]]:
        return [self.step().counts for _ in range(num_steps)]

    @property
    def num_free(self) -> int:
        return len(self.scheduler.free_order)


def test_g1_chunks_share_the_budget_and_blocks_come_back() -> None:
    play = Play(10, max_num_batched_tokens=20, max_num_seqs=4)
    play.add("A", 50, 4)
    play.add("B", 10, 4)
    trace = [(play.step().counts, play.num_free) for _ in range(6)]
    both = {"A": 1, "B": 1}
    assert trace == [({"A": 20}, 8), ({"A": 20}, 7), ({"A": 10, "B": 10}, 5), (both, 5), (both, 5), (both, 10)]
    assert play.step().finished == ["A", "B"]


def test_g2_the_last_token_is_always_computed() -> None:
    play = Play(10)
    tokens = play.add("A", 33, 1)
    play.step()
    seen = []
    for length in (33, 32, 31, 17, 16):
        play.add("B", tokens[:length], 1)
        step = play.step()
        seen.append((step.starts["B"], step.counts["B"]))
    assert seen == [(32, 1), (16, 16), (16, 15), (16, 1), (0, 16)]


def test_g3_a_preempted_request_finds_the_block_that_survived() -> None:
    play = Play(4, 4)
    play.add("A", 7, 6)
    play.add("B", 7, 6)
    assert play.counts(2) == [{"A": 7, "B": 7}, {"A": 1, "B": 1}]
    step = play.step()
    assert (step.counts, step.preempted, play.num_free) == ({"A": 1}, ["B"], 1)
    assert play.counts(3) == [{"A": 1}] * 3
    step = play.step()
    assert (step.counts, step.starts, step.entering) == ({"B": 5}, {"B": 4}, {"B": True})
    assert step.finished == ["A"]
    assert play.counts(4) == [{"B": 1}] * 3 + [{}]
    assert play.num_free == 4


def test_g4_equal_prompts_share_blocks_within_a_step() -> None:
    play = Play()
    play.add("B", play.add("A", 40, 4), 4)
    step = play.step()
    assert step.counts == {"A": 40, "B": 8}
    assert step.tables == {"A": [1, 2, 3], "B": [1, 2, 4]}


def test_g6_a_request_ends_where_the_pool_does() -> None:
    play = Play(5)
    play.add("X", 60, 60)
    assert play.counts(20) == [{"X": 60}] + [{"X": 1}] * 19
    play.scheduler.schedule()
    ((_, reason),) = play.update().values()
    assert reason == "length" and play.num_free == 5
    assert play.step().finished == ["X"]


def test_g7_cached_blocks_are_reused_last() -> None:
    play = Play(6)
    tokens = play.add("A", 40, 1)
    play.step()
    assert play.scheduler.free_order == [3, 4, 5, 6, 2, 1]
    play.add("B", 16, 1)
    assert play.step().tables == {"B": [3]}
    assert play.scheduler.free_order == [4, 5, 6, 2, 1, 3]
    play.add("C", tokens, 1)
    step = play.step()
    assert (step.starts, step.tables) == ({"C": 32}, {"C": [1, 2, 4]})
    assert play.scheduler.free_order == [4, 5, 6, 3, 2, 1]


def test_g8_the_victim_is_the_least_urgent_not_the_last_admitted() -> None:
    play = Play(4, policy="priority", priority_order="lower-first")
    play.add("L", 30, 20, priority=5)
    play.step()
    play.add("H", 32, 20, priority=0)
    assert play.step().counts == {"L": 1, "H": 32}
    step = play.step()
    assert (step.counts, step.preempted) == ({"H": 1}, ["L"])


def test_g8b_of_equal_numbers_the_later_arrival_yields_even_as_requester() -> None:
    play = Play(4, policy="priority", priority_order="lower-first")
    play.add("A", 30, 20)
    play.step()
    play.add("B", 32, 20)
    assert play.step().counts == {"A": 1, "B": 32}
    step = play.step()
    assert (step.counts, step.preempted) == ({"A": 1}, ["B"])


def test_g9_an_unforeseen_stop_wastes_one_step() -> None:
    play = Play(max_steps_in_flight=2)
    play.add("A", 20, 5, stop_ids=frozenset({EOS}))
    assert play.scheduler.schedule().counts == {"A": 20}
    assert play.scheduler.schedule().counts == {"A": 1}
    assert play.update(A=[7]) == {"A": ([7], None)}
    assert play.scheduler.schedule().counts == {"A": 1}
    assert play.update(A=[EOS]) == {"A": ([EOS], "stop")}
    assert play.num_free == 64
    assert play.update() == {}
    step = play.step()
    assert (step.counts, step.finished) == ({}, ["A"])


def test_g10_the_cap_comes_before_the_budget() -> None:
    play = Play(max_num_batched_tokens=40, long_prefill_token_threshold=15)
    for request_id, n_prompt in (("P1", 100), ("P2", 100), ("P3", 5)):
        play.add(request_id, n_prompt, 2)
    rows = [list(counts.values()) for counts in play.counts(4)]
    assert rows == [[15, 15, 5], [15, 15, 1], [15, 15], [15, 15]]


def test_g11_nobody_overtakes_a_head_that_does_not_fit() -> None:
    play = Play(6)
    play.add("A", 60, 3)
    play.step()
    play.add("B", 50, 2)
    play.add("C", 5, 2)
    assert play.counts(3) == [{"A": 1}, {"A": 1}, {"B": 50, "C": 5}]


def test_g12_abort_frees_at_once_with_a_chunk_in_flight() -> None:
    play = Play(max_num_batched_tokens=20)
    for request_id in "ABC":
        play.add(request_id, 30, 4)
    assert play.scheduler.schedule().counts == {"A": 20}
    play.scheduler.abort(["A", "C"])
    assert play.num_free == 64
    assert play.update() == {}
    step = play.step()
    assert (step.counts, step.finished) == ({"B": 20}, ["A", "C"])


def test_g13_the_watermark_counts_only_while_something_runs() -> None:
    play = Play(19, watermark=0.2)
    play.add("A", 120, 2)
    play.add("B", 120, 2)
    assert play.counts(3) == [{"A": 120}, {"A": 1}, {"B": 120}]


def test_g14_seats_bound_admission() -> None:
    play = Play(max_num_seqs=2)
    for request_id in "ABC":
        play.add(request_id, 10, 2)
    assert play.counts(4) == [{"A": 10, "B": 10}, {"A": 1, "B": 1}, {"C": 10}, {"C": 1}]


def test_g16_drafts_that_exceed_the_budget_are_dropped() -> None:
    play = Play(max_num_batched_tokens=6)
    play.add("A", 3, 20)
    play.add("B", 3, 20)
    play.step()
    play.scheduler.set_drafts({"A": [1, 2, 3], "B": [4, 5, 6]})
    step = play.scheduler.schedule()
    assert (step.counts, step.drafts) == ({"A": 4, "B": 2}, {"A": [1, 2, 3], "B": [4]})
    play.update(A=[1, 7], B=[4, 8])
    step = play.step()
    assert (step.counts, step.starts, step.drafts) == ({"A": 1, "B": 1}, {"A": 5, "B": 5}, {})


def test_g17_drafts_end_where_the_model_does() -> None:
    play = Play(max_model_len=10)
    play.add("X", 7, 20)
    play.step()
    play.scheduler.set_drafts({"X": [5, 6, 7, 8, 9]})
    step = play.scheduler.schedule()
    assert (step.counts, step.drafts) == ({"X": 2}, {"X": [5]})
    assert play.update(X=[5, 6]) == {"X": ([5, 6], "length")}


def test_g19_a_victim_with_output_in_flight_is_parked_until_it_is_delivered() -> None:
    play = Play(4, 4, max_steps_in_flight=2)
    play.add("A", 7, 6)
    play.add("B", 7, 6)
    assert play.counts(2) == [{"A": 7, "B": 7}, {"A": 1, "B": 1}]
    step = play.scheduler.schedule()
    assert (step.counts, step.preempted) == ({"A": 1}, ["B"])
    assert (play.scheduler.parked_ids, play.scheduler.waiting_ids) == (["B"], [])
    assert play.update(B=[103])["B"] == ([103], None)
    assert (play.scheduler.parked_ids, play.scheduler.waiting_ids) == ([], ["B"])
    assert play.counts(4) == [{"A": 1}] * 3 + [{}]
    step = play.step()
    assert (step.counts, step.starts, step.finished) == ({"B": 5}, {"B": 4}, ["A"])
    assert play.counts(4) == [{"B": 1}] * 3 + [{}]
    assert play.step().finished == ["B"]
    assert play.num_free == 4


def test_g20_a_chain_is_evicted_from_its_end() -> None:
    play = Play(8, 4)
    tokens = play.add("A", 16, 1)
    play.step()
    assert play.scheduler.free_order == [5, 6, 7, 8, 4, 3, 2, 1]
    play.add("X", 24, 1)
    assert play.step().tables == {"X": [5, 6, 7, 8, 4, 3]}
    assert play.scheduler.free_order == [2, 1, 3, 4, 8, 7, 6, 5]
    play.add("A2", [*tokens, 7], 1)
    step = play.step()
    assert (step.starts, step.counts) == ({"A2": 8}, {"A2": 9})
    assert step.tables["A2"][:2] == [1, 2]
