"""What others' servers got wrong under too much load (field reports A16, B12), on the whole application over a real
scheduler. B20, live caps, is in test_routes_admin."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

import pytest

from server.overload.limits import Limits
from tests.server.metric_samples import read_samples
from tests.server.scheduled_app import CHAT, COMPLETIONS, Caller, ScheduledApp

PATHS = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def build_body(path: str, text: str = "abc", **fields: Any) -> dict[str, Any]:
    what = {"prompt": text} if path == COMPLETIONS else {"messages": [{"role": "user", "content": text}]}
    return {**what, "ignore_eos": True, **fields}


async def refuse(app: ScheduledApp, path: str = COMPLETIONS, **fields: Any) -> Caller:
    """Send a request that is answered without the engine's doing anything."""
    caller = Caller(app.app, path, build_body(path, **fields))
    async with asyncio.timeout(5):
        await caller.task
    return caller


def read_error(caller: Caller) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(caller.body)["error"]
    return error


def read_load(app: ScheduledApp) -> list[float]:
    """Permits, queued requests, queued tokens, live, running: what is 0 when idle."""
    samples = read_samples(app.metrics)
    names = ("pointsman:num_permits", "pointsman:num_requests_queued", "pointsman:num_tokens_queued")
    return [*(samples[name, ""] for name in names), app.client.num_live, samples["vllm:num_requests_running", ""]]


def count_rejections(app: ScheduledApp, reason: str) -> float:
    return read_samples(app.metrics)["vllm:admission_rejections_total", f"reason={reason}"]


@PATHS
@STREAMS
async def test_b12_a_full_queue_refuses_at_once_and_those_admitted_finish(path: str, stream: bool) -> None:
    limits = Limits(max_num_seqs=2, max_queued_requests=3)
    app = ScheduledApp(limits=limits, max_num_seqs=2)
    admitted = [await app.ask(path, stream=stream, max_tokens=5) for _ in range(5)]
    refused = [await refuse(app, path, stream=stream) for _ in range(20)]
    for caller in refused:
        assert (caller.status, read_error(caller)["code"]) == (503, "queue_full")
        assert 1 <= int(caller.headers["retry-after"]) <= 60
    await app.finish(*admitted)
    assert [caller.status for caller in admitted] == [200] * 5
    assert read_load(app) == [0] * 5
    assert count_rejections(app, "queue_full") == 20
    again = await app.ask(path, max_tokens=1)
    await app.finish(again)
    assert again.status == 200


async def test_b12_a_queue_is_full_of_tokens_too() -> None:
    app = ScheduledApp(limits=Limits(max_num_seqs=1, max_queued_tokens=300), max_num_seqs=1)
    first = await app.ask(prompt="x" * 200, max_tokens=3)
    second = await app.ask(prompt="x" * 90, max_tokens=3)
    caller = await refuse(app, text="x" * 90)
    assert (caller.status, read_error(caller)["code"]) == (503, "queue_full")
    assert "prompt tokens" in read_error(caller)["message"]
    await app.step(2)
    assert read_load(app)[1:3] == [1, 91], "the first runs and waits no longer"
    third = await app.ask(prompt="x" * 90, max_tokens=3)
    await app.finish(first, second, third)
    assert count_rejections(app, "queue_tokens_full") == 1


async def test_b12_all_choices_are_counted_before_a_prompt_is_tokenised() -> None:
    app = ScheduledApp(limits=Limits(max_num_seqs=1, max_queued_requests=4), max_num_seqs=1)
    first = await app.ask(max_tokens=3, n=2)
    caller = await refuse(app, n=4)
    assert read_error(caller)["code"] == "queue_full"
    await app.finish(first)


async def test_a_request_is_seated_by_the_first_step_that_computes_any_of_it() -> None:
    app = ScheduledApp(limits=Limits(max_num_seqs=4), max_num_batched_tokens=8, max_num_seqs=4)
    caller = await app.ask(prompt="x" * 99, max_tokens=1)
    assert read_load(app)[1:3] == [1, 100]
    await app.step()
    assert read_load(app)[:3] == [1, 0, 0] and not caller.task.done()
    await app.finish(caller)


@STREAMS
async def test_b12_whoever_waits_too_long_is_told_and_leaves_the_engine(stream: bool) -> None:
    app = ScheduledApp(limits=Limits(queue_timeout_s=0.02))
    caller = await app.ask(stream=stream, max_tokens=5, n=2)
    async with asyncio.timeout(5):
        await caller.task
    assert (caller.status, read_error(caller)["code"]) == (503, "queue_timeout")
    assert "retry-after" in caller.headers
    await app.step()
    assert app.engine.is_empty and read_load(app) == [0] * 5
    assert count_rejections(app, "queue_timeout") == 1, "once for all its choices"


@PATHS
@STREAMS
async def test_e23_a_request_that_takes_too_long_ends_with_an_error_and_frees_its_blocks(
    path: str, stream: bool
) -> None:
    app = ScheduledApp(limits=Limits(request_timeout_s=0.2))
    caller = await app.ask(path, stream=stream, max_tokens=500)
    await app.step(3)
    async with asyncio.timeout(5):
        await caller.task
    if stream:
        assert caller.read_chunks()[-1]["error"]["code"] == "request_timeout"
    else:
        assert (caller.status, read_error(caller)["code"]) == (400, "request_timeout")
    await app.step()
    assert app.engine.is_empty and read_load(app) == [0] * 5
    assert count_rejections(app, "request_timeout") == 1


async def test_a_key_beyond_its_share_is_a_429_and_the_next_one_gets_in_when_one_ends() -> None:
    app = ScheduledApp(limits=Limits(max_requests_per_key=1))
    first = await app.ask(max_tokens=2)
    caller = await refuse(app)
    assert (caller.status, read_error(caller)["type"]) == (429, "rate_limit_error")
    assert "retry-after" in caller.headers
    await app.finish(first)
    second = await app.ask(max_tokens=1)
    await app.finish(second)
    assert count_rejections(app, "key_concurrency") == 1


async def test_a_refused_request_gives_back_what_it_held() -> None:
    app = ScheduledApp(limits=Limits(max_queued_requests=10, max_queued_tokens=10_000, max_requests_per_key=5))
    for fields in ({"n": 0}, {"max_tokens": -1}, {"model": "another"}, {"prompt": "x" * 5000}):
        caller = await refuse(app, **{"text": "abc", **fields})
        assert caller.status in (400, 404)
        assert read_load(app) == [0] * 5


@pytest.mark.parametrize("seed", range(2))
async def test_a16_after_500_clients_that_leave_at_any_moment_nothing_is_in_hand(seed: int) -> None:
    rng = random.Random(seed)
    limits = Limits(max_num_seqs=4, max_queued_requests=12, max_queued_tokens=400, max_requests_per_key=30)
    app = ScheduledApp(limits=limits, max_num_seqs=4)
    callers: list[Caller] = []
    for _ in range(500):
        fields = {"max_tokens": rng.randint(1, 6), "n": rng.randint(1, 2), "stream": rng.random() < 0.5}
        path = rng.choice([COMPLETIONS, CHAT])
        callers.append(Caller(app.app, path, build_body(path, "x" * rng.choice([3, 30, 1500]), **fields)))
        for _ in range(rng.randint(0, 6)):
            await asyncio.sleep(0)
        if rng.random() < 0.6:
            rng.choice(callers[-10:]).leave()
        if rng.random() < 0.4:
            app.engine.step()
    async with asyncio.timeout(20):
        while not all(caller.task.done() for caller in callers):
            await app.step()
    assert [caller.task.exception() for caller in callers] == [None] * 500
    statuses = {caller.status for caller in callers if caller.messages}
    await app.step()
    assert {200, 503} <= statuses <= {200, 400, 429, 499, 503}
    assert app.engine.is_empty and read_load(app) == [0] * 5
