from __future__ import annotations

import random

import pytest

from engine_core.request import Request
from engine_core.sampling_params import SamplingParams
from engine_core.scheduler.request_queue import RequestQueue, build_rank


def create(seq: int) -> Request:
    params = SamplingParams(max_tokens=1)
    return Request(f"r{seq}", [1], params, max_total_tokens=2, rank=build_rank(0, seq, is_higher_first=True))


def drain(queue: RequestQueue) -> list[str]:
    return [queue.pop().request_id for _ in range(len(queue))]


def test_q1_order_is_by_rank_not_by_insertion() -> None:
    queue = RequestQueue()
    for seq in (3, 1, 2):
        queue.add(create(seq))
    assert drain(queue) == ["r1", "r2", "r3"]


def test_q5_a_returning_request_takes_its_old_place() -> None:
    queue = RequestQueue()
    for seq in (1, 2, 3):
        queue.add(create(seq))
    first = queue.pop()
    queue.add(create(4))
    queue.add(first)
    assert drain(queue) == ["r1", "r2", "r3", "r4"]


def test_q8_removed_requests_never_come_up() -> None:
    queue = RequestQueue()
    requests = [create(seq) for seq in range(4)]
    for request in requests:
        queue.add(request)
    queue.remove(requests[0])
    queue.remove(requests[2])
    assert len(queue) == 2 and "r0" not in queue and "r1" in queue
    assert queue.peek() is requests[1]
    assert drain(queue) == ["r1", "r3"]
    assert queue.peek() is None


def test_an_id_can_return_while_its_tombstone_is_still_there() -> None:
    queue = RequestQueue()
    old = create(1)
    queue.add(create(0))
    queue.add(old)
    queue.remove(old)
    queue.add(create(1))
    assert drain(queue) == ["r0", "r1"]


def test_empty_queue() -> None:
    queue = RequestQueue()
    assert queue.peek() is None and len(queue) == 0
    with pytest.raises(IndexError, match="empty queue"):
        queue.pop()


def test_i22_tombstones_do_not_pile_up_behind_a_blocked_head() -> None:
    queue = RequestQueue()
    queue.add(create(0))
    for seq in range(1, 2000):
        request = create(seq)
        queue.add(request)
        queue.remove(request)
    assert len(queue._heap) < 100
    assert drain(queue) == ["r0"]


def test_order_survives_random_adds_and_removals() -> None:
    rng = random.Random(1)
    queue, live = RequestQueue(), {}
    for seq in rng.sample(range(1000), 1000):
        live[seq] = create(seq)
        queue.add(live[seq])
        if rng.random() < 0.7:
            queue.remove(live.pop(rng.choice(sorted(live))))
    assert drain(queue) == [f"r{seq}" for seq in sorted(live)]


def test_the_first_are_told_in_order_whatever_has_come_and_gone() -> None:
    rng = random.Random(5)
    queue, live = RequestQueue(), list[Request]()
    for seq in rng.sample(range(1000), 300):
        live.append(create(seq))
        queue.add(live[-1])
    for request in rng.sample(live, 120):  # few enough that their cells stay where they are
        queue.remove(request)
        live.remove(request)
    in_order = sorted(live, key=lambda request: request.rank)
    for limit in (0, 1, 7, 179, 180, 1000):
        assert queue.get_first(limit) == in_order[:limit]
    assert drain(queue) == [request.request_id for request in in_order], "looking took nothing"


def test_the_first_of_an_empty_queue_are_none() -> None:
    assert RequestQueue().get_first(5) == []
