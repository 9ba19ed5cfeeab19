"""Random events over random configurations, against the oracle of scheduler.md 2.1.

After every call the invariants hold; every read of KV is right; every request ends once, with exactly the tokens that
it gets without any scheduler (hence with any pool, chunk, cache setting or neighbour); and nothing leaks.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_core.messages import FinishReason
from engine_core.request import RequestStatus
from engine_core.scheduler.scheduler import Scheduler
from tests.engine_core.fake_runner import expect_output
from tests.engine_core.scheduler.scheduler_helpers import Harness, create_request, create_scheduler


@dataclass(frozen=True)
class Add:
    """A request arrives. ``stem`` tokens come from a shared text, the rest are drawn."""

    stem: int
    rest: tuple[int, ...]
    max_tokens: int
    params: dict[str, Any]

    @property
    def prompt(self) -> list[int]:
        return [*(i % 7 for i in range(self.stem)), *self.rest] or [0]


@dataclass(frozen=True)
class Abort:
    """The n-th request so far is aborted, between schedule() and update() of the next step if ``in_flight``."""

    n: int
    in_flight: bool


@dataclass(frozen=True)
class Fail:
    """The n-th request so far fails the next time it runs."""

    n: int


Event = Add | Abort | Fail | None  # None: a step

_ends = st.sampled_from([(), (), (3,), (5, 11)]).map(frozenset)
_adds = st.builds(
    Add,
    stem=st.sampled_from([0, 8, 16, 24, 24]) | st.integers(0, 24),
    rest=st.lists(st.integers(0, 2), max_size=6).map(tuple),
    max_tokens=st.sampled_from([20, 20, 1]) | st.integers(1, 20),
    params=st.fixed_dictionaries(
        {"seed": st.integers(0, 2), "eos_token_ids": _ends, "stop_token_ids": _ends, "ignore_eos": st.booleans()}
    ),
)
_events = st.lists(
    st.one_of(
        *[st.none()] * 4,
        *[_adds] * 4,
        st.builds(Abort, st.integers(0, 20), st.booleans()),
        st.builds(Fail, st.integers(0, 20)),
    ),
    min_size=8,
    max_size=40,
)


@st.composite
def _configs(draw: st.DrawFn) -> dict[str, Any]:
    max_num_seqs = draw(st.sampled_from([6, 4, 2, 1]))
    block_size = draw(st.sampled_from([1, 2, 3, 4, 16]))
    return {
        "num_blocks": max(2, draw(st.integers(8, 96)) // block_size),
        "block_size": block_size,
        "max_model_len": draw(st.sampled_from([96, 40]) | st.integers(8, 96)),
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": draw(st.integers(max_num_seqs, 64)),
        "enable_prefix_caching": draw(st.booleans()),
        "watermark": draw(st.sampled_from([0.0, 0.01, 0.3])),
        "max_chunk_size": draw(st.sampled_from([0, 0, 1, 5])),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 3])),
        "enable_chunked_prefill": draw(st.sampled_from([True, True, True, False])),
    }


def _legal(config: dict[str, Any]) -> dict[str, Any]:
    """Chunked prefill off needs a step as long as the context (B9)."""
    if not config["enable_chunked_prefill"]:
        config["max_num_batched_tokens"] = max(config["max_num_batched_tokens"], config["max_model_len"])
    return config


class Player:
    """Plays events on a scheduler and checks it after every call."""

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.harness = Harness(create_scheduler(**config))
        self.adds: dict[str, Add] = {}
        self.seen: Counter[str] = Counter()

    def play(self, events: list[Event]) -> None:
        pending: list[str] = []
        for event in events:
            if isinstance(event, Add):
                self._add(event)
            elif event is None:
                self.step(pending)
                pending = []
            elif not self.adds:
                continue
            elif isinstance(event, Fail):
                request_id = self._pick(event.n)
                if request_id not in self.harness.last:
                    self.harness.runner.failing_ids.add(request_id)
            elif event.in_flight:
                pending.append(self._pick(event.n))
            else:
                self.harness.abort(self._pick(event.n))

    def drain(self) -> None:
        """Let everything end; termination is bounded (I12)."""
        bound = sum(len(add.prompt) + add.max_tokens for add in self.adds.values()) + 3
        for _ in range(bound):
            if not (self.scheduler.has_unfinished_requests() or self.scheduler.has_pending_output()):
                break
            self.step([])
        assert not self.scheduler.has_unfinished_requests() and not self.scheduler.has_pending_output()

    def step(self, aborts_in_flight: list[str]) -> None:
        """Run one step, with checks on the way."""
        self._spoil_unknown_free_blocks()
        oldest = self.scheduler.running[0] if self.scheduler.running else None
        was_running = list(self.scheduler.running)
        counts = self.harness.schedule()
        self._check_step(counts, was_running)
        if oldest is not None:
            assert oldest.request_id in counts, "the oldest running request did not advance"
        if aborts_in_flight:
            self.harness.abort(*aborts_in_flight)
        self.harness.update()
        self._check_rows()

    @property
    def scheduler(self) -> Scheduler:
        return self.harness.scheduler

    def _add(self, add: Add) -> None:
        if len(add.prompt) > self.scheduler.max_prompt_tokens:
            return
        request_id = f"r{len(self.adds)}"
        self.adds[request_id] = add
        self.harness.add(request_id, add.prompt, add.max_tokens, **add.params)

    def _pick(self, n: int) -> str:
        return f"r{n % len(self.adds)}"

    def _spoil_unknown_free_blocks(self) -> None:
        pool = self.scheduler.kv_cache.pool
        self.harness.runner.spoil([block for block in pool.get_free_order() if pool.digests[block] is None])

    def _check_step(self, counts: dict[str, int], was_running: list[Any]) -> None:
        output = self.harness.output
        assert output is not None
        limits = [x for x in (self.config["max_chunk_size"], self.config["long_prefill_token_threshold"]) if x]
        if limits and self.config["enable_chunked_prefill"]:
            assert all(count <= min(limits) for count in counts.values())
        assert not (output.preempted_req_ids and output.scheduled_new_reqs), "V8"
        self.seen["steps"] += 1
        self.seen["preemptions"] += len(output.preempted_req_ids)
        self.seen["hits"] += sum(new.num_computed_tokens > 0 for new in output.scheduled_new_reqs)
        self.seen["partial hits of resumed ones"] += sum(
            new.resumed and new.num_computed_tokens > 0 for new in output.scheduled_new_reqs
        )
        victims = [request.request_id for request in was_running if request.status is RequestStatus.PREEMPTED]
        assert output.preempted_req_ids == victims[::-1]
        # Q3, I11: FCFS never overtakes. Whoever runs arrived before whoever waits.
        newest = max((request.rank for request in self.scheduler.running), default=(0, 0))
        head = self.scheduler.waiting.peek()
        assert head is None or newest < head.rank

    def _check_rows(self) -> None:
        """I29: the deltas rebuild the scheduler's tables."""
        for request in self.scheduler.running:
            row = self.harness.runner.rows[request.request_id]
            assert row.block_ids == request.block_ids and row.num_computed == request.num_computed_tokens
            assert row.tokens == request.all_token_ids

    def check_results(self) -> None:
        """I15 to I18: each request has got what it gets alone, or a prefix of it if it was cut short."""
        capacity = self.scheduler.kv_cache.capacity_tokens + 1
        for request_id, add in self.adds.items():
            params = create_request("", add.prompt, add.max_tokens, **add.params).sampling_params
            token_ids, reason = expect_output(add.prompt, params, min(self.config["max_model_len"], capacity))
            got, last = self.harness.token_ids[request_id], self.harness.last[request_id]
            if last.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert got == token_ids[: len(got)] and len(got) < len(token_ids)
                assert last.error in (None, "the logits are not finite"), "the scheduler gave up on a request"
            else:
                assert (got, last.finish_reason) == (token_ids, reason)

    def check_nothing_leaked(self) -> None:
        """I21, F7."""
        pool = self.scheduler.kv_cache.pool
        assert pool.num_free == pool.num_blocks and not any(pool.ref_counts)
        assert self.scheduler.kv_cache.num_reserved_blocks == 0
        assert not self.scheduler.running and len(self.scheduler.waiting) == 0
        assert sorted(self.harness.reported_finished) == sorted(self.adds) == sorted(self.harness.last)
        assert not self.harness.runner.rows


_settings = settings(
    max_examples=250, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)


@_settings
@given(config=_configs().map(_legal), events=_events)
def test_every_request_ends_once_with_its_own_tokens(config: dict[str, Any], events: list[Event]) -> None:
    player = Player(config)
    player.play(events)
    player.drain()
    player.check_results()
    player.check_nothing_leaked()


@_settings
@given(config=_configs().map(_legal), events=_events)
def test_f7_i21_abort_all_restores_an_empty_scheduler(config: dict[str, Any], events: list[Event]) -> None:
    player = Player(config)
    player.play(events)
    player.harness.abort(*player.adds)
    assert not player.scheduler.has_unfinished_requests()
    player.drain()
    player.check_nothing_leaked()
    assert player.scheduler.kv_cache.try_reset_prefix_cache()


def _random_load(rng: random.Random) -> tuple[dict[str, Any], list[Event]]:
    """Return a crowded pool and many requests with few different stems: hits, twins, evictions, preemptions."""
    block_size = rng.choice([1, 2, 4, 8])
    config = {
        "num_blocks": max(2, rng.randint(24, 72) // block_size),
        "block_size": block_size,
        "max_model_len": 64,
        "max_num_seqs": rng.randint(2, 8),
        "max_num_batched_tokens": rng.choice([8, 16, 64]),
        "enable_prefix_caching": rng.random() < 0.8,
        "watermark": rng.choice([0.0, 0.0, 0.1]),
        "max_chunk_size": rng.choice([0, 0, 3]),
        "long_prefill_token_threshold": 0,
        "enable_chunked_prefill": rng.random() < 0.8,
    }
    events: list[Event] = []
    for _ in range(rng.randint(40, 80)):
        kind = rng.random()
        if kind < 0.4:
            rest = tuple(rng.randrange(3) for _ in range(rng.randint(0, 4)))
            events.append(Add(rng.choice([0, 6, 12, 18]), rest, rng.randint(1, 24), {"seed": rng.randrange(2)}))
        elif kind < 0.45:
            events.append(Abort(rng.randrange(30), rng.random() < 0.5))
        elif kind < 0.46:
            events.append(Fail(rng.randrange(30)))
        else:
            events.append(None)
    return _legal(config), events


def test_i12_i15_seeded_loads_on_crowded_pools() -> None:
    seen: Counter[str] = Counter()
    for seed in range(80):
        config, events = _random_load(random.Random(seed))
        player = Player(config)
        player.play(events)
        player.drain()
        player.check_results()
        player.check_nothing_leaked()
        seen += player.seen
    # The load is what it claims to be.
    assert seen["preemptions"] > 300 and seen["hits"] > 300 and seen["partial hits of resumed ones"] > 100, seen


def test_i15_cache_chunks_and_pool_size_change_no_token() -> None:
    """The same requests under very different regimes, compared with each other."""
    adds = [Add(12, (i % 3,) * (i % 4), 16, {"seed": i % 2}) for i in range(10)]
    results = []
    for overrides in (
        {"num_blocks": 100},
        {"num_blocks": 100, "enable_prefix_caching": False},
        {"num_blocks": 8},
        {"num_blocks": 8, "enable_prefix_caching": False, "max_chunk_size": 1},
        {"num_blocks": 30, "block_size": 1, "long_prefill_token_threshold": 3},
        {"num_blocks": 9, "enable_chunked_prefill": False, "max_num_seqs": 2},
    ):
        player = Player({**_PLAIN, **overrides})
        player.play(list(adds))
        player.drain()
        player.check_nothing_leaked()
        results.append(player.harness.token_ids)
    assert all(result == results[0] for result in results)


_PLAIN: dict[str, Any] = {
    "block_size": 4,
    "max_model_len": 64,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "enable_prefix_caching": True,
    "max_chunk_size": 0,
    "long_prefill_token_threshold": 0,
    "enable_chunked_prefill": True,
}
