from __future__ import annotations

import time

from engine_core.scheduler.output import ModelRunnerOutput
from engine_core.scheduler.snapshots import MAX_RUNNING, MAX_WAITING, build_snapshot
from engine_core.snapshot import SHARED, RequestSnapshot
from tests.engine_core.scheduler.scenario_helpers import abort_all
from tests.engine_core.scheduler.scheduler_helpers import Harness, create_request, create_scheduler


def test_it_holds_requests_in_order_of_service_with_their_figures() -> None:
    h = Harness(create_scheduler(max_num_seqs=2, max_num_batched_tokens=16))
    h.add("A", 10, 5, arrival_time=1.0)
    h.add("B", 30, 5, arrival_time=2.0)
    h.add("C", 7, 5, arrival_time=3.0)
    h.step()
    h.step()
    snapshot = build_snapshot(h.scheduler, 9.0)
    assert (snapshot.time, snapshot.max_num_seqs, snapshot.max_num_batched_tokens) == (9.0, 2, 16)
    assert (snapshot.num_running, snapshot.num_waiting) == (2, 1)
    assert snapshot.running == (
        RequestSnapshot("A", "running", 1.0, 10, 11, 2, 0, 1, 0, ""),
        RequestSnapshot("B", "running", 2.0, 30, 21, 0, 0, 2, 0, ""),
    )
    (waiting,) = snapshot.waiting
    assert (waiting.request_id, waiting.status, waiting.num_blocks) == ("C", "waiting", 0)
    assert waiting.wait_reason == "max_num_seqs: 2 of 2 are running"
    abort_all(h)


def test_the_block_map_is_a_copy_of_that_moment() -> None:
    h = Harness(create_scheduler(num_blocks=8))
    h.add("A", range(40), 5)
    h.step()
    h.add("B", range(40), 5)
    h.step()
    snapshot = build_snapshot(h.scheduler, 0.0)
    blocks = snapshot.blocks
    assert (blocks.num_blocks, blocks.num_free) == (8, h.free)
    tables = [list(h.table("A")), list(h.table("B"))]
    abort_all(h)
    assert [list(table) for table in blocks.tables] == tables
    owners = blocks.list_owners()
    assert owners.count(SHARED) == 2 and owners.count(0) == owners.count(1) == 1


def test_a_preempted_request_is_among_the_waiting() -> None:
    for in_flight in (1, 2):
        h = Harness(create_scheduler(num_blocks=4, max_steps_in_flight=in_flight))
        h.add("A", 30, 30)
        h.add("B", 30, 30)
        h.step()
        while not (h.scheduler.waiting or h.scheduler.parked):
            h.step()
        snapshot = build_snapshot(h.scheduler, 0.0)
        (waiting,) = snapshot.waiting
        assert (waiting.request_id, waiting.status, waiting.num_preemptions) == ("B", "preempted", 1)
        assert waiting.wait_reason.startswith("preempted; ")
        assert snapshot.num_waiting == 1
        abort_all(h)


def test_the_lists_end_somewhere_and_the_counts_do_not() -> None:
    scheduler = create_scheduler(max_num_seqs=MAX_RUNNING + 5, num_blocks=1000)
    for i in range(1000):
        scheduler.add_request(create_request(f"R{i}", 1, 5))
    scheduler.schedule(0.0)
    snapshot = build_snapshot(scheduler, 0.0)
    assert len(snapshot.running) == MAX_RUNNING and snapshot.num_running == MAX_RUNNING + 5
    assert len(snapshot.waiting) == MAX_WAITING
    assert snapshot.num_waiting == 1000 - MAX_RUNNING - 5
    assert len(snapshot.blocks.tables) == MAX_RUNNING + 5, "blocks of those that are not listed are in use all the same"
    assert snapshot.waiting[0].request_id == f"R{MAX_RUNNING + 5}"


def test_it_costs_the_engine_less_than_a_millisecond() -> None:
    h = Harness(create_scheduler(max_num_seqs=256, num_blocks=8192, max_num_batched_tokens=100_000))
    for i in range(1256):
        h.scheduler.add_request(create_request(f"cmpl-{i}", 300, 50))
    for _ in range(3):
        output = h.scheduler.schedule(0.0)
        h.scheduler.update_from_output(output, ModelRunnerOutput(token_ids=[1] * len(output.req_ids)))
    assert len(h.scheduler.running) == 256 and len(h.scheduler.waiting) == 1000
    best_s = min(_time_snapshot(h) for _ in range(30))
    assert best_s < 1e-3, f"{best_s * 1e3:.2f} ms"


def _time_snapshot(h: Harness) -> float:
    started = time.perf_counter()
    build_snapshot(h.scheduler, 0.0)
    return time.perf_counter() - started
