"""The scheduler against the reference model, step by step: every decision, every block id, every queue.

The reference recomputes all from scratch and shares no code with the scheduler, so what both get right they get right
for different reasons; its own tests tie it to the golden traces.
"""

from __future__ import annotations

import inspect
import random
from collections import Counter
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_core.messages import FinishReason
from engine_core.scheduler.output import SchedulerOutput
from tests.engine_core.scheduler.event_player import (
    Add,
    Draft,
    Event,
    Player,
    aborts,
    adds,
    configs,
    drafts,
    random_load,
)
from tests.engine_core.scheduler.reference_scheduler import ReferenceScheduler, ReferenceStep

_REFERENCE_FIELDS = set(inspect.signature(ReferenceScheduler).parameters)


class ShadowPlayer(Player):
    """A player whose every event also happens to the reference."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.reference = ReferenceScheduler(**{k: v for k, v in config.items() if k in _REFERENCE_FIELDS})
        self._expected = ReferenceStep({}, {}, {}, {}, {}, [], [])

    def add(self, add: Add) -> None:
        num_before = len(self.adds)
        super().add(add)
        if len(self.adds) > num_before:
            request = self.scheduler.requests[f"r{num_before}"]
            self.reference.add(
                request.request_id,
                add.prompt,
                max_tokens=add.max_tokens,
                priority=add.priority,
                stop_ids=request.stop_ids,
                min_tokens=request.sampling_params.min_tokens,
                arrival_time=request.arrival_time,
            )

    def abort(self, *request_ids: str) -> None:
        super().abort(*request_ids)
        self.reference.abort(request_ids)
        self._compare_state()

    def draft(self, draft: Draft) -> dict[str, list[int]]:
        guesses = super().draft(draft)
        self.reference.set_drafts(guesses)
        return guesses

    def _check_step(self, counts: dict[str, int]) -> None:
        super()._check_step(counts)
        output = self.harness.output
        assert output is not None
        self._compare_step(output, self.reference.schedule(self.harness.now))
        self._compare_state()

    def update(self) -> None:
        output, _ = self.harness.in_flight[0]
        before = {request_id: len(tokens) for request_id, tokens in self.harness.token_ids.items()}
        results: list[dict[str, list[int]]] = []
        execute = self.harness.runner.execute

        def record(step: SchedulerOutput) -> Any:
            result = execute(step)
            results.append(dict(result.sampled_token_ids(step)))
            return result

        self.harness.runner.execute = record  # type: ignore[method-assign]
        super().update()
        self.harness.runner.execute = execute  # type: ignore[method-assign]
        if not output.req_ids:
            return
        took_s = output.total_num_scheduled_tokens / 10
        news = self.reference.update(output.req_ids, results[0], execute_time_s=took_s)
        for request_id, (token_ids, reason) in news.items():
            assert self.harness.token_ids[request_id][before[request_id] :] == token_ids
            last = self.harness.last.get(request_id)
            assert (last and last.finish_reason) == (FinishReason(reason) if reason else None)
        for request_id, tokens in self.harness.token_ids.items():
            assert len(tokens) == before[request_id] or request_id in news
        self._compare_state()

    def _compare_step(self, output: SchedulerOutput, expected: ReferenceStep) -> None:
        assert output.num_scheduled_tokens == expected.counts
        assert dict(zip(output.req_ids, output.starts, strict=True)) == expected.starts
        assert {request_id: self.harness.table(request_id) for request_id in output.req_ids} == expected.tables
        assert output.scheduled_spec_decode_tokens == expected.drafts
        assert {new.request_id: new.resumed for new in output.scheduled_new_reqs} == expected.entering
        assert (output.preempted_req_ids, output.finished_req_ids) == (expected.preempted, expected.finished)

    def _compare_state(self) -> None:
        scheduler, reference = self.scheduler, self.reference
        assert [request.request_id for request in scheduler.running] == reference.running_ids
        assert sorted(scheduler.parked) == sorted(reference.parked_ids)
        waiting = [request for id_, request in scheduler.requests.items() if id_ in scheduler.waiting]
        assert [r.request_id for r in sorted(waiting, key=lambda r: r.rank)] == reference.waiting_ids
        assert self.harness.free_order == reference.free_order
        assert not reference.failed_ids


_events = st.lists(st.one_of(*[st.none()] * 4, *[adds] * 3, aborts, drafts), min_size=8, max_size=40)


@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
@given(config=configs(), events=_events)
def test_i19_every_decision_is_the_references(config: dict[str, Any], events: list[Event]) -> None:
    player = ShadowPlayer(config)
    player.play(events)
    player.drain()
    player.check_nothing_leaked()


def test_i19_seeded_loads_on_crowded_pools() -> None:
    seen: Counter[str] = Counter()
    for seed in range(1000, 1040):
        config, events = random_load(random.Random(seed))
        player = ShadowPlayer(config)
        player.play(events)
        player.drain()
        seen += player.seen
    kinds = ("preemptions", "hits", "partial hits of resumed ones", "parked", "drafts", "displaced")
    assert all(seen[kind] > 10 for kind in kinds), seen
