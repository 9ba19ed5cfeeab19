"""The scheduler's rules once more, obvious instead of fast: what the real scheduler is compared with, step by step.

Nothing is kept that can be recomputed: queues, ref counts, placeholders and the prefix index are derived whenever asked
for. It shares no code with engine_core, and must not. Source: scheduler.md, sections 1.1 to 1.13 and 2.3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(eq=False, slots=True)
class Request:
    """What defines a request; the blocks it still lacks are those of the moment when its table last grew."""

    id: str
    seq: int
    priority: int
    tokens: list[int]
    n_prompt: int
    max_total: int
    stop_ids: frozenset[int]
    min_tokens: int
    arrival_time: float
    drafts: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    num_computed: int = 0
    num_registered: int = 0
    num_lacking: int = 0
    is_running: bool = False
    was_preempted: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One request's share of a step; `placeholders` are the tokens that it may sample."""

    request: Request
    start: int
    count: int
    drafts: list[int]
    placeholders: int
    entering: bool

    @property
    def is_decode(self) -> bool:
        """Whether its last output is all it computes, drafts apart; such rows register when their result is in."""
        return self.count == len(self.drafts) + 1 and self.placeholders > 0 and self.start >= self.request.n_prompt


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """What schedule() decided, by request id."""

    counts: dict[str, int]
    starts: dict[str, int]
    tables: dict[str, list[int]]
    drafts: dict[str, list[int]]
    entering: dict[str, bool]
    preempted: list[str]
    finished: list[str]


class ReferenceScheduler:
    """See the module; the arguments are those of the real scheduler's configuration."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        max_model_len: int,
        enable_prefix_caching: bool = True,
        watermark: float = 0.0,
        max_chunk_size: int = 0,
        long_prefill_token_threshold: int = 0,
        enable_chunked_prefill: bool = True,
        policy: str = "fcfs",
        priority_order: str = "higher-first",
        delay_factor: float = 0.0,
        max_steps_in_flight: int = 1,
        full_prompt_gate: bool = True,
    ) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.max_num_batched_tokens, self.max_num_seqs = max_num_batched_tokens, max_num_seqs
        self.max_model_len = max_model_len
        self.enable_prefix_caching = enable_prefix_caching
        self.watermark_blocks = int(watermark * (num_blocks + 1))
        caps = [limit for limit in (max_chunk_size, long_prefill_token_threshold) if limit > 0]
        self.is_chunking = enable_chunked_prefill
        self.cap = min(caps) if caps and enable_chunked_prefill else max_model_len
        self.policy, self.priority_order = policy, priority_order
        self.delay_factor = delay_factor
        self.max_steps_in_flight = max_steps_in_flight
        self.full_prompt_gate = full_prompt_gate
        self.requests: dict[str, Request] = {}
        self.in_flight: list[dict[str, Row]] = []
        self.free_order = list(range(1, num_blocks + 1))
        self.contents: dict[int, tuple[int, ...] | None] = dict.fromkeys(self.free_order)
        self.failed_ids: list[str] = []
        self.finished_ids: list[str] = []
        self.num_added = 0
        self.prefill_latency_s = 0.0

    # ---- what can be recomputed ----

    def _key(self, r: Request) -> tuple[int, int]:
        if self.policy == "fcfs":
            return (0, r.seq)
        return (-r.priority if self.priority_order == "higher-first" else r.priority, r.seq)

    def _rows(self, r: Request) -> list[Row]:
        return [row for step in self.in_flight for row in step.values() if row.request is r]

    def _running(self) -> list[Request]:
        return sorted((r for r in self.requests.values() if r.is_running), key=self._key)

    def _waiting(self, *, parked: bool = False) -> list[Request]:
        """Requests without a seat; parked are those with results still to come (V9)."""
        idle = (r for r in self.requests.values() if not r.is_running and bool(self._rows(r)) == parked)
        return sorted(idle, key=self._key)

    @property
    def running_ids(self) -> list[str]:
        return [r.id for r in self._running()]

    @property
    def waiting_ids(self) -> list[str]:
        return [r.id for r in self._waiting()]

    @property
    def parked_ids(self) -> list[str]:
        return [r.id for r in self._waiting(parked=True)]

    def _sampled_end(self, r: Request) -> int:
        """Length once all steps in flight have delivered everything they may."""
        return len(r.tokens) + sum(row.placeholders for row in self._rows(r))

    def _want(self, r: Request) -> int:
        return self._sampled_end(r) + len(r.drafts) - r.num_computed

    def _share(self, r: Request) -> int:
        """What a running request takes of an unlimited budget (S3a, S3b)."""
        return max(0, min(self._want(r), self.cap, r.max_total - 1 - r.num_computed))

    def _ref_counts(self) -> Counter[int]:
        return Counter(block for r in self.requests.values() for block in r.table)

    def _num_sole_blocks(self, owners: Iterable[Request], *, but: Sequence[int] = ()) -> int:
        refs = self._ref_counts()
        return sum(refs[block] == 1 for r in owners for block in r.table if block not in but)

    def _cdiv(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # ---- blocks ----

    def _hits(self, r: Request) -> list[int]:
        """Blocks that hold the longest known prefix, never the whole of the tokens (K3, K5)."""
        index = {content: block for block, content in self.contents.items() if content is not None}
        hits: list[int] = []
        for end in range(self.block_size, len(r.tokens), self.block_size):
            block = index.get(tuple(r.tokens[:end]))
            if block is None:
                break
            hits.append(block)
        return hits

    def _register(self, r: Request, num_tokens: int) -> None:
        """Make the blocks that `num_tokens` newly fill findable; of twins the referenced elder stays (K7, K9)."""
        if not self.enable_prefix_caching:
            return
        for i in range(r.num_registered, num_tokens // self.block_size):
            r.num_registered = i + 1
            content = tuple(r.tokens[: (i + 1) * self.block_size])
            twin = next((block for block, other in self.contents.items() if other == content), None)
            if twin is not None and self._ref_counts()[twin] > 0:
                continue
            if twin is not None:
                self.contents[twin] = None
            self.contents[r.table[i]] = content

    def _release(self, r: Request) -> None:
        """Last block first; known content to the tail of the free list, else to its head (P5)."""
        while r.table:
            block = r.table.pop()
            if self._ref_counts()[block] == 0:
                self.free_order.insert(0 if self.contents[block] is None else len(self.free_order), block)

    def _grow(self, r: Request, num_slots: int) -> None:
        num_new = max(0, self._cdiv(num_slots) - len(r.table))
        assert num_new <= len(self.free_order)
        for _ in range(num_new):
            block = self.free_order.pop(0)
            self.contents[block] = None
            r.table.append(block)
        if num_new:
            r.num_lacking = max(0, self._cdiv(len(r.tokens)) - len(r.table))

    # ---- events ----

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        *,
        max_tokens: int,
        priority: int = 0,
        stop_ids: frozenset[int] = frozenset(),
        min_tokens: int = 0,
        arrival_time: float = 0.0,
    ) -> None:
        assert request_id not in self.requests
        tokens, seq = list(prompt), self.num_added
        max_total = min(len(tokens) + max_tokens, self.max_model_len, self.num_blocks * self.block_size + 1)
        self.num_added += 1
        self.requests[request_id] = Request(
            request_id, seq, priority, tokens, len(tokens), max_total, stop_ids, min_tokens, arrival_time
        )

    def abort(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            if request_id in self.requests:
                self._finish(self.requests[request_id])

    def _finish(self, r: Request) -> None:
        self._release(r)
        del self.requests[r.id]
        self.finished_ids.append(r.id)

    def set_drafts(self, drafts: dict[str, list[int]]) -> None:
        for request_id, tokens in drafts.items():
            r = self.requests.get(request_id)
            if r is not None and r.is_running and r.num_computed >= self._sampled_end(r) - 1:
                r.drafts = list(tokens)

    # ---- a step ----

    def schedule(self, now: float = 0.0) -> ReferenceStep:
        finished, self.finished_ids = self.finished_ids, []
        rows: dict[str, Row] = {}
        preempted: list[str] = []
        if len(self.in_flight) < self.max_steps_in_flight:
            was_busy = bool(self._running())
            self._preempt_for_head(now, preempted)
            num_preempted = len(preempted)
            budget = self._schedule_running(rows, preempted)
            if len(preempted) == num_preempted:
                self._schedule_waiting(rows, preempted, budget, now if was_busy else None)
        if rows:
            self.in_flight.append(rows)
        return ReferenceStep(
            counts={i: row.count for i, row in rows.items()},
            starts={i: row.start for i, row in rows.items()},
            tables={i: list(row.request.table) for i, row in rows.items()},
            drafts={i: list(row.drafts) for i, row in rows.items() if row.drafts},
            entering={i: row.request.was_preempted for i, row in rows.items() if row.entering},
            preempted=preempted,
            finished=finished,
        )

    def _schedule_running(self, rows: dict[str, Row], preempted: list[str]) -> int:
        budget = self.max_num_batched_tokens
        for r in self._running():
            if budget <= 0 or not r.is_running:
                break
            n = min(self._share(r), budget)
            if not self.is_chunking and n < len(r.tokens) - r.num_computed:
                continue
            n = self._make_room(r, n, preempted)
            if n > 0:
                rows[r.id] = self._commit(r, n)
                budget -= n
        return budget

    def _make_room(self, r: Request, n: int, preempted: list[str]) -> int:
        """Give up r's drafts, then victims from the tail; returns what r may compute, 0 if it waits (L4, V2, V5)."""
        while n > 0 and self._cdiv(r.num_computed + n) - len(r.table) > len(self.free_order):
            n_without_drafts = self._want(r) - len(r.drafts)
            if n > n_without_drafts:
                n = n_without_drafts
                continue
            running = self._running()
            victim = running[-1]
            if self._num_sole_blocks([victim]) == 0 and r is not running[0]:
                return 0
            self._preempt(victim, preempted)
            if victim is r:
                return 0
        return n

    def _preempt(self, victim: Request, preempted: list[str]) -> None:
        self._release(victim)
        victim.num_computed = victim.num_registered = victim.num_lacking = 0
        victim.drafts = []
        victim.is_running, victim.was_preempted = False, True
        preempted.append(victim.id)

    def _commit(self, r: Request, n: int, *, entering: bool = False) -> Row:
        start, end, sampled_end = r.num_computed, r.num_computed + n, self._sampled_end(r)
        self._grow(r, end)
        drafts = r.drafts[: max(0, end - sampled_end)]
        placeholders = 1 + len(drafts) if end >= sampled_end else 0
        row = Row(r, start, n, drafts, placeholders, entering)
        if not row.is_decode:
            self._register(r, min(end, len(r.tokens)))
        r.drafts, r.num_computed = [], end
        return row

    def _is_held(self, r: Request, now: float) -> bool:
        waited_s = now - r.arrival_time
        return not r.was_preempted and self.delay_factor > 0 and waited_s <= self.delay_factor * self.prefill_latency_s

    def _admission(self, r: Request, budget: int) -> tuple[list[int], int, int]:
        """The head's hits, its first chunk, and how many blocks must be free for it (A2 to A5)."""
        hits, refs = self._hits(r), self._ref_counts()
        num_hit_tokens = len(hits) * self.block_size
        rest = len(r.tokens) - num_hit_tokens
        n = min(rest, self.cap, budget)
        if not self.is_chunking and n < rest:
            n = 0
        end = len(r.tokens) if self.full_prompt_gate else num_hit_tokens + n
        required = max(0, self._cdiv(end) - len(hits)) + sum(refs[block] == 0 for block in hits)
        running = self._running()
        if running:
            required += self.watermark_blocks
        if self.full_prompt_gate:
            required += sum(other.num_lacking for other in running)
        return hits, n, required

    def _schedule_waiting(self, rows: dict[str, Row], preempted: list[str], budget: int, now: float | None) -> None:
        """Admit heads until one does not fit; `now` is None when the delay does not apply."""
        while budget > 0 and self._waiting() and len(self._running()) < self.max_num_seqs:
            r = self._waiting()[0]
            if r.id in preempted or (now is not None and self._is_held(r, now)):
                return
            if not r.was_preempted:
                now = None
            hits, n, required = self._admission(r, budget)
            if n < 1 or required > len(self.free_order):
                if self._running() or self.in_flight:
                    return
                self.failed_ids.append(r.id)
                self._finish(r)
                continue
            self.free_order = [block for block in self.free_order if block not in hits]
            r.table = hits
            r.num_computed, r.num_registered, r.is_running = len(hits) * self.block_size, len(hits), True
            rows[r.id] = self._commit(r, n, entering=True)
            budget -= n

    def _preempt_for_head(self, now: float, preempted: list[str]) -> None:
        """Take the tail's seat or blocks for a head of a strictly more urgent number (Q7)."""
        waiting, running = self._waiting(), self._running()
        if self.policy != "priority" or not waiting or not running:
            return
        head, tail, rank = waiting[0], running[-1], self._key(waiting[0])[0]
        if rank >= self._key(tail)[0] or self._is_held(head, now):
            return
        left = self.max_num_batched_tokens - sum(self._share(r) for r in running[:-1])
        hits, n, required = self._admission(head, left)
        lacks_seat = len(running) >= self.max_num_seqs
        lacks_blocks = required > len(self.free_order)
        if n < 1 or not (lacks_seat or lacks_blocks):
            return
        # As if all of the less urgent were gone, with what they hold and what they were promised.
        others = [r for r in running if self._key(r)[0] > rank]
        reclaimable = self._num_sole_blocks(others, but=hits)
        if len(others) == len(running):
            required -= self.watermark_blocks
        if self.full_prompt_gate:
            required -= sum(r.num_lacking for r in others)
        if required > len(self.free_order) + reclaimable:
            return
        if lacks_seat or self._num_sole_blocks([tail], but=hits) > 0:
            self._preempt(tail, preempted)

    # ---- its results ----

    def update(
        self, order: list[str], sampled: dict[str, list[int]], *, execute_time_s: float = 0.0
    ) -> dict[str, tuple[list[int], str | None]]:
        rows = self.in_flight.pop(0)
        if not all(row.is_decode for row in rows.values()):
            self.prefill_latency_s = execute_time_s
        news: dict[str, tuple[list[int], str | None]] = {}
        for request_id in order:
            row = rows[request_id]
            if self.requests.get(request_id) is not row.request:
                continue
            delivered, reason = self._apply(row, sampled.get(request_id, []))
            if delivered:
                news[request_id] = (delivered, reason)
        return news

    def _apply(self, row: Row, tokens: list[int]) -> tuple[list[int], str | None]:
        """Append what a row sampled, up to a stop; only a request that still runs moves its positions (U4, U5, V9)."""
        r = row.request
        assert row.placeholders or not tokens
        if r.is_running and tokens:
            r.num_computed -= len(row.drafts) - (len(tokens) - 1)
        delivered: list[int] = []
        reason: str | None = None
        for token in tokens:
            r.tokens.append(token)
            delivered.append(token)
            if token in r.stop_ids and len(r.tokens) - r.n_prompt >= r.min_tokens:
                reason = "stop"
            elif len(r.tokens) >= r.max_total:
                reason = "length"
            if reason:
                break
        if r.is_running:
            num_valid = r.num_computed - sum(later.count for later in self._rows(r))
            self._register(r, min(num_valid, len(r.tokens)))
        if reason:
            self._finish(r)
        return delivered, reason
