"""Random events over random configurations, and a player that runs them against the oracle of scheduler.md 2.1.

After every call the invariants hold, and every read of KV is right; at the end every request has ended once, with
exactly the tokens that it gets without any scheduler, and nothing has leaked.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st

from engine_core.messages import FinishReason
from engine_core.request import Request, RequestStatus
from engine_core.scheduler.scheduler import PauseState, Scheduler
from tests.engine_core.fake_runner import expect_output
from tests.engine_core.scheduler.scheduler_helpers import Harness, create_request, create_scheduler


@dataclass(frozen=True)
class Add:
    """A request arrives. ``stem`` tokens come from a shared text, the rest are drawn."""

    stem: int
    rest: tuple[int, ...]
    max_tokens: int
    params: dict[str, Any]
    priority: int = 0

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


@dataclass(frozen=True)
class Reset:
    """The prefix cache is reset."""

    reset_running: bool


@dataclass(frozen=True)
class Pause:
    """The scheduler holds still, in part or wholly, until the next one."""

    state: PauseState


@dataclass(frozen=True)
class Draft:
    """Every running request gets drafts, right up to ``wrong_at``."""

    num_tokens: int
    wrong_at: int


Event = Add | Abort | Fail | Reset | Pause | Draft | None  # None: a step

_ends = st.sampled_from([(), (), (3,), (5, 11)]).map(frozenset)
adds = st.builds(
    Add,
    stem=st.sampled_from([0, 8, 16, 24, 24]) | st.integers(0, 24),
    rest=st.lists(st.integers(0, 2), max_size=6).map(tuple),
    max_tokens=st.sampled_from([20, 20, 1]) | st.integers(1, 20),
    params=st.fixed_dictionaries(
        {
            "seed": st.integers(0, 2),
            "eos_token_ids": _ends,
            "stop_token_ids": _ends,
            "ignore_eos": st.booleans(),
            "min_tokens": st.sampled_from([0, 0, 0, 3]),
        }
    ),
    priority=st.integers(-1, 2),
)
aborts = st.builds(Abort, st.integers(0, 20), st.booleans())
drafts = st.builds(Draft, st.integers(1, 4), st.integers(0, 4))
_rare = st.one_of(
    st.builds(Fail, st.integers(0, 20)),
    st.builds(Reset, st.booleans()),
    st.builds(Pause, st.sampled_from(PauseState)),
)
all_events = st.lists(
    st.one_of(*[st.none()] * 5, *[adds] * 4, aborts, drafts, _rare),
    min_size=8,
    max_size=40,
)


@st.composite
def configs(draw: st.DrawFn) -> dict[str, Any]:
    """Draw arguments of create_scheduler; pools go down to 2 blocks."""
    max_num_seqs = draw(st.sampled_from([6, 4, 2, 1]))
    block_size = draw(st.sampled_from([1, 2, 3, 4, 16]))
    return make_legal(
        {
            "num_blocks": max(2, draw(st.integers(8, 96)) // block_size),
            "block_size": block_size,
            "max_model_len": draw(st.sampled_from([96, 40]) | st.integers(8, 96)),
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": draw(st.integers(max_num_seqs, 64)),
            "max_steps_in_flight": draw(st.sampled_from([1, 1, 2, 2, 3, 4])),
            "enable_prefix_caching": draw(st.sampled_from([True, True, False])),
            "watermark": draw(st.sampled_from([0.0, 0.01, 0.3])),
            "full_prompt_gate": draw(st.sampled_from([True, True, False])),
            "max_chunk_size": draw(st.sampled_from([0, 0, 1, 5])),
            "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 3])),
            "enable_chunked_prefill": draw(st.sampled_from([True, True, True, False])),
            "policy": draw(st.sampled_from(["fcfs", "priority"])),
            "priority_order": draw(st.sampled_from(["higher-first", "lower-first"])),
            "delay_factor": draw(st.sampled_from([0.0, 0.0, 1.0])),
            "enable_cascade_attn": draw(st.booleans()),
        }
    )


def make_legal(config: dict[str, Any]) -> dict[str, Any]:
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
        self._pending_aborts: list[str] = []
        self._is_after_reset = False

    @property
    def scheduler(self) -> Scheduler:
        return self.harness.scheduler

    def play(self, events: list[Event]) -> None:
        """Play them in order."""
        for event in events:
            self.play_one(event)

    def play_one(self, event: Event) -> None:
        """Play an event; one about a request is nothing before the first arrival."""
        if event is None:
            self.step()
        elif isinstance(event, Add):
            self.add(event)
        elif isinstance(event, Reset):
            self._reset(event)
        elif isinstance(event, Pause):
            self.scheduler.pause(event.state)
        elif isinstance(event, Draft):
            self.draft(event)
        elif self.adds:
            self._hit(event, f"r{event.n % len(self.adds)}")

    def add(self, add: Add) -> None:
        """Let a request arrive, unless the server would refuse it."""
        if len(add.prompt) > self.scheduler.max_prompt_tokens:
            return
        request_id = f"r{len(self.adds)}"
        self.adds[request_id] = add
        where = {"priority": add.priority, "arrival_time": self.harness.now}
        self.harness.add(request_id, add.prompt, add.max_tokens, **add.params, **where)

    def abort(self, *request_ids: str) -> None:
        """Abort requests."""
        self.harness.abort(*request_ids)

    def draft(self, draft: Draft) -> dict[str, list[int]]:
        """Guess for everybody; with steps in flight the tokens to guess from are not known, and the runner guesses."""
        guesses = {
            request.request_id: self._guess(request, draft) if not self.harness.in_flight else [-1] * draft.num_tokens
            for request in self.scheduler.running
        }
        self.scheduler.set_draft_token_ids(guesses)
        self.scheduler.check_invariants()
        return guesses

    def step(self) -> None:
        """Run one step, with checks on the way."""
        self.harness.now += 1.0
        first = self.scheduler.running[0] if self.scheduler.running else None
        is_free = self._may_schedule()
        counts = self.harness.schedule()
        self._check_step(counts)
        if first is not None and is_free:
            self._check_first_advanced(first, counts)
        aborted, self._pending_aborts = self._pending_aborts, []
        if aborted:
            self.abort(*aborted)
        if not counts or len(self.harness.in_flight) >= self.scheduler.max_steps_in_flight:
            self.update()
        if not self.harness.in_flight:
            self._check_rows()

    def update(self) -> None:
        """Apply the oldest result in flight."""
        self.harness.update()

    def drain(self) -> None:
        """Let everything end; termination is bounded (I12)."""
        self.scheduler.pause(PauseState.UNPAUSED)
        num_tokens = sum(len(add.prompt) + add.max_tokens for add in self.adds.values())
        bound = (num_tokens + 3) * (self.scheduler.max_steps_in_flight + 1)
        for _ in range(bound):
            if not self.harness.has_work:
                break
            self.step()
        assert not self.harness.has_work, "no end in sight"

    def check_results(self) -> None:
        """I15 to I18: each request has got what it gets alone, or a prefix of it if it was cut short."""
        capacity = self.scheduler.kv_cache.capacity_tokens + 1
        for request_id, add in self.adds.items():
            params = create_request("", add.prompt, add.max_tokens, **add.params).sampling_params
            token_ids, reason = expect_output(add.prompt, params, min(self.config["max_model_len"], capacity))
            got, last = self.harness.token_ids[request_id], self.harness.last[request_id]
            if last.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert got == token_ids[: len(got)] and len(got) < len(token_ids)
                assert last.error in (None, "The logits are not finite."), "the scheduler gave up on a request"
            else:
                assert (got, last.finish_reason) == (token_ids, reason)

    def check_nothing_leaked(self) -> None:
        """I21, F7."""
        scheduler = self.scheduler
        pool = scheduler.kv_cache.pool
        assert pool.num_free == pool.num_blocks and not any(pool.ref_counts)
        assert scheduler.kv_cache.num_reserved_blocks == 0
        assert not (scheduler.running or len(scheduler.waiting) or scheduler.parked or scheduler.num_steps_in_flight)
        assert sorted(self.harness.reported_finished) == sorted(self.adds) == sorted(self.harness.last)
        assert not self.harness.runner.rows
        stats = scheduler.make_stats()
        assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)

    # ------------------------------------------------------------------ parts

    def _hit(self, event: Abort | Fail, request_id: str) -> None:
        if isinstance(event, Fail):
            if request_id not in self.harness.last:
                self.harness.runner.failing_ids.add(request_id)
        elif event.in_flight:
            self._pending_aborts.append(request_id)
        else:
            self.abort(request_id)

    def _reset(self, reset: Reset) -> None:
        num_running = len(self.scheduler.running)
        is_done = self.scheduler.reset_prefix_cache(reset_running=reset.reset_running)
        assert is_done == (reset.reset_running or num_running == 0), "K12"
        self._is_after_reset |= reset.reset_running
        assert not (is_done and self.scheduler.kv_cache.pool.index)
        self.scheduler.check_invariants()
        self.seen["dropped"] += num_running * reset.reset_running * bool(self.harness.in_flight)

    def _guess(self, request: Request, draft: Draft) -> list[int]:
        row = self.harness.runner.rows[request.request_id]
        right = row.guess(draft.num_tokens)
        return [token if i < draft.wrong_at else (token + 1) % 16 for i, token in enumerate(right)]

    def _may_schedule(self) -> bool:
        scheduler = self.scheduler
        is_full = scheduler.num_steps_in_flight >= scheduler.max_steps_in_flight
        return not is_full and scheduler.pause_state is not PauseState.PAUSED_ALL

    def _check_first_advanced(self, first: Request, counts: dict[str, int]) -> None:
        """V11: the first in line advances, unless its end is certain or (Q7) somebody more urgent took its place."""
        assert self.harness.output is not None
        is_displaced = first.request_id in self.harness.output.preempted_req_ids and self.config["policy"] == "priority"
        is_ending = first.num_computed_tokens == first.max_total_tokens - 1
        assert first.request_id in counts or is_displaced or is_ending, "the first running request did not advance"

    def _check_step(self, counts: dict[str, int]) -> None:
        output = self.harness.output
        assert output is not None
        limits = [x for x in (self.config["max_chunk_size"], self.config["long_prefill_token_threshold"]) if x]
        if limits and self.config["enable_chunked_prefill"]:
            assert all(count <= min(limits) for count in counts.values())
        if self.config["policy"] == "fcfs":
            is_after_reset, self._is_after_reset = self._is_after_reset, False
            is_admitting = any(not new.resumed for new in output.scheduled_new_reqs)
            assert not (output.preempted_req_ids and is_admitting) or is_after_reset, "V8"
        # Q3, I11: whoever was admitted stands before whoever still waits.
        head = self.scheduler.waiting.peek()
        admitted = [self.scheduler.requests[new.request_id].rank for new in output.scheduled_new_reqs]
        assert head is None or max(admitted, default=head.rank) <= head.rank
        self._check_common_prefix(output.num_common_prefix_blocks, output.req_ids, output.starts)
        self._count(output)

    def _check_common_prefix(self, num_blocks: int, req_ids: list[str], starts: list[int]) -> None:
        """CA1, CA3: counted from the tables, as far as everybody has computed it."""
        if not self.config["enable_cascade_attn"] or len(req_ids) < 2:
            assert num_blocks == 0
            return
        limit = min(starts) // self.config["block_size"]
        columns = list(zip(*(self.harness.table(request_id)[:limit] for request_id in req_ids), strict=True))
        equal = [len(set(column)) == 1 for column in columns]
        assert num_blocks == next((i for i, is_equal in enumerate(equal) if not is_equal), limit)

    def _count(self, output: Any) -> None:
        self.seen["steps"] += 1
        self.seen["preemptions"] += len(output.preempted_req_ids)
        self.seen["hits"] += sum(new.num_computed_tokens > 0 for new in output.scheduled_new_reqs)
        self.seen["partial hits of resumed ones"] += sum(
            new.resumed and new.num_computed_tokens > 0 for new in output.scheduled_new_reqs
        )
        self.seen["parked"] += len(self.scheduler.parked)
        self.seen["drafts"] += len(output.scheduled_spec_decode_tokens)
        self.seen["displaced"] += bool(
            output.preempted_req_ids and any(not n.resumed for n in output.scheduled_new_reqs)
        )
        self.seen["common prefixes"] += output.num_common_prefix_blocks > 0

    def _check_rows(self) -> None:
        """I29: the deltas rebuild the scheduler's tables."""
        for request in self.scheduler.running:
            row = self.harness.runner.rows.get(request.request_id)
            if row is None:
                continue  # reset while running, and not told yet
            assert request.status is RequestStatus.RUNNING
            assert row.block_ids == request.block_ids and row.num_computed == request.num_computed_tokens
            assert row.tokens == request.all_token_ids


def random_load(rng: random.Random) -> tuple[dict[str, Any], list[Event]]:
    """Return a crowded pool and many requests with few different stems: hits, twins, evictions, preemptions."""
    block_size = rng.choice([1, 2, 4, 8])
    config = {
        "num_blocks": max(2, rng.randint(24, 72) // block_size),
        "block_size": block_size,
        "max_model_len": 64,
        "max_num_seqs": rng.randint(2, 8),
        "max_num_batched_tokens": rng.choice([8, 16, 64]),
        "max_steps_in_flight": rng.choice([1, 2, 2, 3, 4]),
        "enable_prefix_caching": rng.random() < 0.8,
        "watermark": rng.choice([0.0, 0.0, 0.1]),
        "full_prompt_gate": rng.random() < 0.7,
        "max_chunk_size": rng.choice([0, 0, 3]),
        "long_prefill_token_threshold": 0,
        "enable_chunked_prefill": rng.random() < 0.8,
        "policy": rng.choice(["fcfs", "priority"]),
        "priority_order": rng.choice(["higher-first", "lower-first"]),
        "delay_factor": rng.choice([0.0, 0.0, 2.0]),
        "enable_cascade_attn": rng.random() < 0.5,
    }
    events: list[Event] = []
    for _ in range(rng.randint(40, 80)):
        kind = rng.random()
        if kind < 0.4:
            rest = tuple(rng.randrange(3) for _ in range(rng.randint(0, 4)))
            stem, max_tokens = rng.choice([0, 6, 12, 18]), rng.randint(1, 24)
            params = {"seed": rng.randrange(2), "stop_token_ids": rng.choice([frozenset(), frozenset({3, 11})])}
            events.append(Add(stem, rest, max_tokens, params, priority=rng.randrange(3)))
        elif kind < 0.45:
            events.append(Abort(rng.randrange(30), rng.random() < 0.5))
        elif kind < 0.5:
            events.append(Draft(rng.randint(1, 4), rng.randrange(5)))
        else:
            events.append(None)
    return make_legal(config), events
