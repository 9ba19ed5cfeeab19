from __future__ import annotations

import asyncio
import dataclasses
import itertools

import pytest

from server.bench.client import BenchClient
from server.bench.load import Load, build_arrivals, build_prompts, run_load
from server.bench.results import RequestResult
from tests.server.bench.fake_completer import FakeCompleter
from tests.server.bench.stub_server import HEAD, StubServer, obey, token

LOAD = Load(num_requests=9, concurrency=3, prompt_tokens=16, output_tokens=4)


async def test_a_closed_loop_keeps_its_streams_busy_and_asks_each_prompt_once() -> None:
    completer, seen = FakeCompleter(), list[RequestResult]()
    run = await run_load(completer, LOAD, on_result=seen.append)
    assert completer.most_running == 3
    assert completer.prompts == build_prompts(LOAD)
    assert len(seen) == len(run.results) == 9


async def test_more_streams_than_requests_do_no_harm() -> None:
    run = await run_load(FakeCompleter(), dataclasses.replace(LOAD, num_requests=2))
    assert len(run.results) == 2


async def test_results_come_in_the_order_of_the_prompts() -> None:
    class Backwards(FakeCompleter):
        async def complete(self, prompt: str, max_tokens: int, start_s: float | None = None) -> RequestResult:
            for _ in range(2 * (9 - prompts.index(prompt))):
                await asyncio.sleep(0)
            return RequestResult(start_s=0.0, num_output_tokens=prompts.index(prompt))

    prompts = build_prompts(LOAD)
    run = await run_load(Backwards(), dataclasses.replace(LOAD, concurrency=9))
    assert [result.num_output_tokens for result in run.results] == list(range(9))


async def test_open_requests_are_due_at_their_arrivals_however_late_the_client_is() -> None:
    # Each look at the clock takes a second, in which ten requests become due.
    load = dataclasses.replace(LOAD, rate=10.0)
    completer = FakeCompleter()
    run = await run_load(completer, load)
    assert completer.starts == pytest.approx([1.0 + arrival for arrival in build_arrivals(load)])
    assert len(run.results) == 9


async def test_open_requests_do_not_wait_for_each_other() -> None:
    completer = FakeCompleter()
    await run_load(completer, dataclasses.replace(LOAD, rate=1e6, concurrency=1))
    assert completer.most_running > 1


def test_arrivals_are_poissonian_and_those_of_their_seed() -> None:
    load = Load(num_requests=4_000, rate=20.0, seed=5)
    times = build_arrivals(load)
    assert times == build_arrivals(load) != build_arrivals(dataclasses.replace(load, seed=6))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert times[0] == 0.0 and min(gaps) >= 0.0
    assert mean == pytest.approx(1 / 20, rel=0.05)
    # Exponential: the deviation equals the mean.
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.1)


def test_prompts_share_their_beginning_and_nothing_more() -> None:
    load = dataclasses.replace(LOAD, prompt_tokens=40, prefix_tokens=30)
    words = [prompt.split() for prompt in build_prompts(load)]
    assert {len(each) for each in words} == {40}
    assert len({tuple(each[:30]) for each in words}) == 1
    assert len({tuple(each[30:]) for each in words}) == len(words)


def test_prompts_are_those_of_their_seed() -> None:
    assert build_prompts(LOAD) == build_prompts(LOAD) != build_prompts(dataclasses.replace(LOAD, seed=1))


async def test_over_real_connections_there_are_as_many_as_streams() -> None:
    async with StubServer() as server:
        run = await run_load(BenchClient(server.target, "m"), LOAD)
    assert [result.error for result in run.results] == [None] * 9
    assert server.most_open == 3
    assert 0 < run.wall_s < 30


async def test_a_server_that_dies_midway_fails_the_rest_and_the_load_still_ends() -> None:
    async def obey_thrice(request: object, writer: asyncio.StreamWriter) -> None:
        if len(server.requests) > 3:
            await server.die()
            writer.transport.abort()
            return
        await obey(request, writer)  # type: ignore[arg-type]

    async with StubServer(obey_thrice) as server:
        run = await run_load(BenchClient(server.target, "m"), dataclasses.replace(LOAD, concurrency=1))
    errors = [result.error for result in run.results]
    assert errors[:3] == [None] * 3
    assert all(errors[3:]) and errors[-1] == f"nothing listens on 127.0.0.1 port {server.target.port}"


async def test_a_cancelled_load_closes_its_connections() -> None:
    async def talk_on(_: object, writer: asyncio.StreamWriter) -> None:
        asked.set()
        writer.write(HEAD)
        while True:  # until the connection breaks
            writer.write(token())
            await writer.drain()
            await asyncio.sleep(0)

    asked = asyncio.Event()
    async with StubServer(talk_on) as server:
        task = asyncio.create_task(run_load(BenchClient(server.target, "m"), LOAD))
        await asked.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        async with asyncio.timeout(30):
            await server.quiet.wait()
