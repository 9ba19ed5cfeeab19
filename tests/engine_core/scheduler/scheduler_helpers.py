"""Small schedulers and requests for tests, and a driver that runs them against the fake runner."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import count
from typing import Any

from engine_core.config import SchedulerConfig
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from engine_core.sampling_params import SamplingParams
from engine_core.scheduler.constraint import Constraint
from engine_core.scheduler.constraints import build_constraints
from engine_core.scheduler.output import SchedulerOutput
from engine_core.scheduler.scheduler import Scheduler
from tests.engine_core.fake_runner import FakeModelRunner

_CACHE_FIELDS = {"num_blocks", "block_size", "enable_prefix_caching", "watermark", "full_prompt_gate"}
_distinct_token = count(1000)


def create_scheduler(
    *,
    max_model_len: int = 10_000,
    constraints: Sequence[Constraint] | None = None,
    max_steps_in_flight: int = 1,
    **overrides: Any,
) -> Scheduler:
    """Return a roomy scheduler; overrides are fields of SchedulerConfig and arguments of KVCacheManager."""
    cache = {"num_blocks": 64, "block_size": 16, **{k: v for k, v in overrides.items() if k in _CACHE_FIELDS}}
    steps = {"max_num_batched_tokens": 4096, **{k: v for k, v in overrides.items() if k not in _CACHE_FIELDS}}
    config = SchedulerConfig(**steps)
    return Scheduler(
        config=config,
        kv_cache=KVCacheManager(hash_seed=b"test", **cache),
        max_model_len=max_model_len,
        constraints=build_constraints(config, block_size=cache["block_size"]) if constraints is None else constraints,
        max_steps_in_flight=max_steps_in_flight,
    )


def is_sentence(text: str) -> bool:
    """Tell whether a text is fit for a client's eyes."""
    return text[0].isupper() and text.endswith(".")


def create_request(
    request_id: str,
    prompt: int | Sequence[int],
    max_tokens: int = 1,
    *,
    priority: int = 0,
    arrival_time: float = 0.0,
    cache_salt: str = "",
    skip_reading_prefix_cache: bool = False,
    **params: Any,
) -> EngineCoreRequest:
    """Return a request; a prompt given as a length is made of tokens that no other request has."""
    if isinstance(prompt, int):
        prompt = [next(_distinct_token) for _ in range(prompt)]
    sampling_params = SamplingParams(max_tokens=max_tokens, **params)
    return EngineCoreRequest(
        request_id, list(prompt), sampling_params, arrival_time, priority, cache_salt, skip_reading_prefix_cache
    )


class Harness:
    """A scheduler, a fake runner, and a record of everything that came out.

    With more than one step in flight, steps execute as late as they may: a step runs when its result is due. Before
    it does, every block that was free and of no known content when it was scheduled is overwritten.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        pool = scheduler.kv_cache.pool
        self.scheduler = scheduler
        self.runner = FakeModelRunner(
            num_blocks=pool.num_blocks,
            block_size=scheduler.kv_cache.block_size,
            is_overlapping=scheduler.max_steps_in_flight > 1,
        )
        self.now = 0.0
        self.output: SchedulerOutput | None = None
        self.in_flight: deque[tuple[SchedulerOutput, list[int]]] = deque()
        self.token_ids: dict[str, list[int]] = {}
        self.last: dict[str, EngineCoreOutput] = {}
        self.reported_finished: list[str] = []

    def add(self, request_id: str, prompt: int | Sequence[int], max_tokens: int = 1, **params: Any) -> None:
        """Add a request."""
        self.scheduler.add_request(create_request(request_id, prompt, max_tokens, **params))
        self.token_ids[request_id] = []
        self.scheduler.check_invariants()

    def abort(self, *request_ids: str) -> None:
        """Abort requests."""
        self._take(EngineCoreOutputs(self.scheduler.abort_requests(request_ids)))

    def schedule(self) -> dict[str, int]:
        """Run the first half of a step; returns what it scheduled."""
        pool = self.scheduler.kv_cache.pool
        garbage = [block for block in pool.get_free_order() if pool.digests[block] is None]
        self.output = self.scheduler.schedule(self.now)
        self.scheduler.check_invariants()
        assert self.output.total_num_scheduled_tokens <= self.scheduler.max_num_batched_tokens
        self.reported_finished += self.output.finished_req_ids
        if self.output.has_news or not self.in_flight:
            self.in_flight.append((self.output, garbage))
        return self.output.num_scheduled_tokens

    def update(self) -> None:
        """Execute the oldest step in flight and apply its result."""
        output, garbage = self.in_flight.popleft()
        self.runner.spoil(garbage)
        result = self.runner.execute(output)
        result.execute_time_s = output.total_num_scheduled_tokens / 10
        self._take(self.scheduler.update_from_output(output, result))

    def step(self) -> dict[str, int]:
        """Schedule a step, and apply the oldest result if no other may run ahead; returns what was scheduled."""
        scheduled = self.schedule()
        if not scheduled or len(self.in_flight) >= self.scheduler.max_steps_in_flight:
            self.update()
        return scheduled

    def drain(self, max_steps: int = 10_000) -> list[dict[str, int]]:
        """Step until nothing is left to do; asserts that the pool is whole again."""
        steps = []
        while self.has_work:
            assert len(steps) < max_steps, "the scheduler does not come to an end"
            steps.append(self.step())
        pool = self.scheduler.kv_cache.pool
        assert pool.num_free == pool.num_blocks
        assert sorted(self.reported_finished) == sorted(self.last)
        return [step for step in steps if step]

    @property
    def has_work(self) -> bool:
        """Whether anything is left to do."""
        scheduler = self.scheduler
        return bool(scheduler.has_unfinished_requests() or scheduler.has_pending_output() or self.in_flight)

    @property
    def free(self) -> int:
        """Free blocks."""
        return self.scheduler.kv_cache.pool.num_free

    @property
    def free_order(self) -> list[int]:
        """The free queue, head first."""
        return self.scheduler.kv_cache.pool.get_free_order()

    def table(self, request_id: str) -> list[int]:
        """A live request's block table."""
        return self.scheduler.requests[request_id].block_ids

    def _take(self, outputs: EngineCoreOutputs) -> None:
        self.scheduler.check_invariants()
        records = outputs.as_records()
        assert len({output.request_id for output in records}) == len(records)
        for output in records:
            assert output.request_id not in self.last, "news of a request after its last output"
            assert output.new_token_ids or output.finish_reason is not None
            assert output.error is None or is_sentence(output.error), "clients read it"
            self.token_ids[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.last[output.request_id] = output
