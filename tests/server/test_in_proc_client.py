import asyncio
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from engine_core import EngineDeadError, EnginePhase, EngineState, FinishReason
from server.errors import ServerStoppingError
from server.in_proc_client import InProcEngineClient
from server.metrics import ServerMetrics
from server.output_processor import OutputProcessor
from tests.server.fake_engine import READY, CharDecodeStream, FakeEngine, char_bytes, create_request, output
from tests.server.status_samples import create_row, create_snapshot


def create_client() -> tuple[InProcEngineClient, FakeEngine]:
    """A client not yet started, and the engine behind it."""
    engines: list[FakeEngine] = []

    def create_engine(*callbacks: Any) -> FakeEngine:
        engines.append(FakeEngine(*callbacks))
        return engines[0]

    processor = OutputProcessor(
        new_decode_stream=CharDecodeStream, token_bytes=char_bytes, metrics=ServerMetrics("tiny")
    )
    return InProcEngineClient(create_engine, processor), engines[0]


async def run_callbacks() -> None:
    """Let what was scheduled on the loop run."""
    await asyncio.sleep(0)


async def test_a_request_goes_down_and_its_outputs_come_up() -> None:
    client, engine = create_client()
    client.start()
    request = create_request()
    generation = client.generate(request)
    first = asyncio.ensure_future(anext(generation))
    await run_callbacks()
    assert engine.requests == [request.engine_request]
    engine.step(output("he"))
    assert (await first).text == "he"
    engine.step(output("y", FinishReason.LENGTH))
    assert [part.text async for part in generation] == ["y"]
    assert engine.aborts == []
    assert client.num_live == 0


async def test_outputs_come_from_the_engines_thread_one_call_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    client, engine = create_client()
    client.start()
    await run_callbacks()
    streams = [client.generate(create_request(request_id)) for request_id in "abc"]
    firsts = [asyncio.ensure_future(anext(stream)) for stream in streams]
    await run_callbacks()
    loop, calls = asyncio.get_running_loop(), []
    original = loop.call_soon_threadsafe

    def count(callback: Callable[..., object], *args: Any, **kwargs: Any) -> asyncio.Handle:
        calls.append(callback)
        return original(callback, *args, **kwargs)

    monkeypatch.setattr(loop, "call_soon_threadsafe", count)
    outputs = [output(request_id, FinishReason.LENGTH, request_id=request_id) for request_id in "abc"]
    thread = threading.Thread(target=engine.step, args=outputs)
    thread.start()
    thread.join()
    assert len(calls) == 1
    assert [part.text for part in await asyncio.gather(*firsts)] == ["a", "b", "c"]


async def test_leaving_early_aborts_in_the_engine() -> None:
    client, engine = create_client()
    client.start()
    generation = client.generate(create_request())
    first = asyncio.ensure_future(anext(generation))
    await run_callbacks()
    engine.step(output("x"))
    await first
    await generation.aclose()
    assert engine.aborts == [["r"]]
    assert client.num_live == 0
    engine.step(output("late"))
    await run_callbacks()
    assert engine.aborts == [["r"]]


async def test_a_cancelled_consumer_aborts_in_the_engine() -> None:
    client, engine = create_client()
    client.start()
    task = asyncio.ensure_future(anext(client.generate(create_request())))
    await run_callbacks()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert engine.aborts == [["r"]]


async def test_a_step_with_stop_strings_makes_one_abort_call() -> None:
    client, engine = create_client()
    client.start()
    tasks = [asyncio.ensure_future(anext(client.generate(create_request(name, stop=["!"])))) for name in "ab"]
    await run_callbacks()
    engine.step(output("x!", request_id="a"), output("y!", request_id="b"))
    assert [(part.text, part.stop_reason) for part in await asyncio.gather(*tasks)] == [("x", "!"), ("y", "!")]
    assert engine.aborts == [["a", "b"]]


async def test_the_engines_death_raises_in_every_generation_and_in_later_ones() -> None:
    client, engine = create_client()
    client.start()
    tasks = [asyncio.ensure_future(anext(client.generate(create_request(name)))) for name in "ab"]
    await run_callbacks()
    engine.die("a step failed")
    for task in tasks:
        with pytest.raises(EngineDeadError, match="a step failed"):
            await task
    with pytest.raises(EngineDeadError):
        await anext(client.generate(create_request("c")))
    assert client.state.phase is EnginePhase.DEAD
    assert client.num_live == 0


async def test_a_request_that_the_engine_refuses_leaves_nothing_behind() -> None:
    client, engine = create_client()
    client.start()
    engine.state = EngineState(EnginePhase.STOPPED)
    with pytest.raises(EngineDeadError):
        await anext(client.generate(create_request()))
    assert client.num_live == 0


async def test_fail_all_tells_every_client_why_and_aborts_once() -> None:
    client, engine = create_client()
    client.start()
    tasks = [asyncio.ensure_future(anext(client.generate(create_request(name)))) for name in "ab"]
    await run_callbacks()
    client.fail_all("the server is shutting down")
    for task in tasks:
        with pytest.raises(ServerStoppingError, match="shutting down"):
            await task
    client.fail_all("again")
    assert engine.aborts == [["a", "b"]]


async def test_states_are_heard_on_the_loops_thread() -> None:
    client, engine = create_client()
    heard: list[tuple[EngineState, threading.Thread]] = []
    client.start(lambda state: heard.append((state, threading.current_thread())))
    loading = EngineState(EnginePhase.LOADING, "weights", 0.5)
    thread = threading.Thread(target=engine.set_state, args=[loading])
    thread.start()
    thread.join()
    await run_callbacks()
    assert heard == [(READY, threading.main_thread()), (loading, threading.main_thread())]


async def test_the_engines_figures_are_passed_on() -> None:
    client, engine = create_client()
    assert client.state.phase is EnginePhase.LOADING
    assert client.seconds_since_progress() == 0.25
    client.shutdown(1.5)
    assert engine.shutdown_timeouts == [1.5]


def test_an_engine_that_outlives_the_loop_is_not_disturbed() -> None:
    client, engine = create_client()
    engine.step(output("before the start"))

    async def start() -> None:
        client.start()

    asyncio.run(start())
    engine.step(output("x"))
    engine.die("late")


async def test_a_look_at_the_engine_comes_from_its_thread() -> None:
    client, engine = create_client()
    client.start()
    future = client.take_snapshot()
    assert future is not None and not future.done()
    snapshot = create_snapshot(create_row("r"))
    thread = threading.Thread(target=engine.snapshots_asked[0].set_result, args=(snapshot,))
    thread.start()
    thread.join()
    assert await future is snapshot


async def test_a_look_that_nobody_waits_for_when_the_engine_ends_is_no_failure_in_the_log(
    caplog: pytest.LogCaptureFixture,
) -> None:
    client, engine = create_client()
    client.start()
    assert client.take_snapshot() is not None
    engine.snapshots_asked.pop().set_exception(EngineDeadError("stopped"))
    await run_callbacks()
    gc.collect()
    assert caplog.records == []


async def test_what_is_noted_of_a_live_request_can_be_read_and_of_others_not() -> None:
    client, engine = create_client()
    client.start()
    generation = client.generate(create_request(key_id="team-a"))
    first = asyncio.ensure_future(anext(generation))
    await run_callbacks()
    record = client.get_record("r")
    assert record is not None and record.key_id == "team-a"
    engine.step(output("x", FinishReason.LENGTH))
    assert (await first).text == "x"
    assert client.get_record("r") is None
