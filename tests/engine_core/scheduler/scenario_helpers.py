"""What scenarios need on top of the harness: constraints that hold requests back, foretold tokens, and a clean end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine_core.request import Request
from engine_core.sampling_params import SamplingParams
from engine_core.scheduler.constraint import Constraint, Verdict
from engine_core.scheduler.scheduler import Scheduler
from engine_core.scheduler.step_plan import StepPlan
from tests.engine_core.fake_runner import VOCAB_SIZE, expect_output
from tests.engine_core.scheduler.scheduler_helpers import Harness, create_scheduler


class Park(Constraint):
    """Holds requests back from admission by id, as a feature that waits for an outside event does."""

    touches_decode = False

    def __init__(self, *request_ids: str, verdict: Verdict = Verdict.SKIP) -> None:
        self.request_ids = set(request_ids)
        self.verdict = verdict

    def gate(self, request: Request, plan: StepPlan) -> Verdict:
        return self.verdict if request.request_id in self.request_ids else Verdict.ADMIT


class SitOut(Constraint):
    """Gives running requests no token while their id is listed, as a pipeline's cadence does."""

    def __init__(self, *request_ids: str) -> None:
        self.request_ids = set(request_ids)

    def cap(self, request: Request, num_computed_tokens: int, num_new_tokens: int, plan: StepPlan) -> int:
        return 0 if request.request_id in self.request_ids else num_new_tokens


class OneAdapter(Constraint):
    """Lets requests of one adapter run at a time; those of another are passed by. Requests without one always run."""

    touches_decode = False

    def __init__(self, adapters: Mapping[str, str]) -> None:
        self._adapters = adapters
        self._active: set[str | None] = set()

    def begin_step(self, plan: StepPlan, running: Sequence[Request]) -> None:
        self._active = {self._adapters.get(request.request_id) for request in running}

    def gate(self, request: Request, plan: StepPlan) -> Verdict:
        adapter = self._adapters.get(request.request_id)
        is_free = adapter is None or not self._active - {None, adapter}
        return Verdict.ADMIT if is_free else Verdict.SKIP

    def commit(self, request: Request, num_computed_tokens: int, num_new_tokens: int, plan: StepPlan) -> None:
        self._active.add(self._adapters.get(request.request_id))


def create_lower_first(**overrides: Any) -> Scheduler:
    """Return a scheduler under the priority policy in which the lower number is more urgent."""
    return create_scheduler(policy="priority", priority_order="lower-first", **overrides)


def foretell(prompt: Sequence[int], num_tokens: int, seed: int = 0) -> list[int]:
    """Return the tokens that the fake model will sample after a prompt."""
    params = SamplingParams(max_tokens=num_tokens, seed=seed)
    return expect_output(prompt, params, len(prompt) + num_tokens)[0]


def other_than(token_id: int) -> int:
    """Return a token of the fake model's vocabulary that is not this one: a draft that will be rejected."""
    return (token_id + 1) % VOCAB_SIZE


def propose(h: Harness, num_drafts: int, *request_ids: str) -> None:
    """Let the runner draft for these requests, or for all."""
    h.scheduler.set_draft_token_ids({id_: [-1] * num_drafts for id_ in request_ids or h.scheduler.requests})


def preempted_in(h: Harness) -> list[str]:
    """Return whom the last step preempted."""
    assert h.output is not None
    return h.output.preempted_req_ids


def run_to_end(h: Harness, max_steps: int = 1000) -> list[dict[str, int]]:
    """Step until nothing is left, whatever is in flight; returns the steps that scheduled something."""
    steps: list[dict[str, int]] = []
    while h.scheduler.has_unfinished_requests() or h.scheduler.has_pending_output():
        assert len(steps) < max_steps, "the scheduler does not come to an end"
        steps.append(h.step())
    while h.in_flight:
        h.update()
    h.drain()
    assert_empty(h)
    return [step for step in steps if step]


def abort_all(h: Harness) -> None:
    """Abort whatever lives, let what is in flight come in, and see that nothing is left of anybody (F7)."""
    h.abort(*h.scheduler.requests)
    assert not h.scheduler.has_unfinished_requests()
    assert h.free == h.scheduler.kv_cache.pool.num_blocks
    run_to_end(h)


def assert_empty(h: Harness) -> None:
    """Assert that the scheduler and the runner hold nothing for any request."""
    scheduler = h.scheduler
    assert not (scheduler.requests or scheduler.running or scheduler.parked or len(scheduler.waiting))
    assert scheduler.num_steps_in_flight == 0 and not h.runner.rows
    assert scheduler.kv_cache.num_reserved_blocks == 0
    assert not any(scheduler.kv_cache.pool.ref_counts)
    stats = scheduler.make_stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
