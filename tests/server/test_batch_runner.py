from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import pytest
from starlette.types import Receive, Scope, Send

from engine_core import EngineDeadError, EnginePhase
from server.batch.files import BatchFileError
from server.batch.runner import BatchRunner, BatchTally
from server.generation import GenerationRequest
from tests.server.batch_files import CHAT, build_line, numbered_lines
from tests.server.fake_engine_client import FakeEngineClient, ScriptItem, create_state, say
from tests.server.http_helpers import build_app


async def as_lines(values: Iterable[Any]) -> AsyncIterator[bytes | None]:
    for value in values:
        yield value if isinstance(value, bytes | None) else json.dumps(value).encode()


async def run(engine: FakeEngineClient, values: Iterable[Any], window: int = 4) -> tuple[list[Any], BatchTally]:
    """The decoded output lines of a batch, and what was counted."""
    written: list[bytes] = []
    runner = create_runner(engine, window)
    tally = await asyncio.wait_for(runner.run(as_lines(values), written.append), 10)
    return [json.loads(line) for line in written], tally


def create_runner(engine: FakeEngineClient, window: int, **options: Any) -> BatchRunner:
    return BatchRunner(
        build_app(engine), window=window, is_engine_dead=lambda: engine.state.phase is EnginePhase.DEAD, **options
    )


async def test_each_line_gets_the_answer_that_http_would_give_in_openais_format() -> None:
    (text, chat), tally = await run(FakeEngineClient(), [build_line("a"), build_line("b", url=CHAT)])
    assert set(text) == {"id", "custom_id", "response", "error"}
    assert (text["custom_id"], text["error"]) == ("a", None)
    assert text["id"].startswith("batch_req_") and text["id"] != chat["id"]
    assert set(text["response"]) == {"status_code", "request_id", "body"}
    assert text["response"]["status_code"] == 200
    assert text["response"]["request_id"]
    assert text["response"]["body"]["choices"][0]["text"] == "Hello there"
    assert chat["response"]["body"]["choices"][0]["message"]["content"] == "Hello there"
    assert (tally.num_lines, tally.num_failed, tally.num_output_tokens) == (2, 0, 4)


@pytest.mark.parametrize(
    ("line", "code"),
    [
        (b"{", "invalid_json"),
        (b"\xff", "invalid_json"),
        (b"[]", "invalid_line"),
        (None, "line_too_long"),
        ({"method": "POST", "url": CHAT, "body": {}}, "invalid_line"),
        ({**build_line("x"), "custom_id": 7}, "invalid_line"),
        ({**build_line("x"), "method": "GET"}, "invalid_method"),
        ({**build_line("x"), "url": "/v1/embeddings"}, "invalid_url"),
        ({**build_line("x"), "url": ["/v1/completions"]}, "invalid_url"),
        ({**build_line("x"), "body": "hi"}, "invalid_body"),
        (build_line("x", stream=True), "stream_not_supported"),
        (b'{"method":"POST","url":"/v1/completions","body":{"prompt":1e999},"custom_id":"x"}', "invalid_body"),
        (build_line("first"), "duplicate_custom_id"),
    ],
)
async def test_a_line_that_cannot_be_run_gets_an_error_and_the_rest_goes_on(line: Any, code: str) -> None:
    (first, bad, last), tally = await run(FakeEngineClient(), [build_line("first"), line, build_line("last")])
    assert first["response"]["status_code"] == last["response"]["status_code"] == 200
    assert (bad["response"], bad["error"]["code"]) == (None, code)
    assert bad["error"]["message"].endswith(".")
    custom_id = line.get("custom_id") if isinstance(line, dict) else "x" if line and b"custom_id" in line else None
    assert bad["custom_id"] == (custom_id if isinstance(custom_id, str) else None)
    assert tally.num_failed == 1


async def test_a_refused_request_is_a_response_with_its_status() -> None:
    (refused,), tally = await run(FakeEngineClient(), [build_line("a", temperature=9)])
    assert refused["error"] is None
    assert refused["response"]["status_code"] == 400
    assert refused["response"]["body"]["error"]["param"] == "temperature"
    assert tally.num_failed == 1


async def test_text_beyond_ascii_and_lone_surrogates_pass() -> None:
    engine = FakeEngineClient()
    line = json.dumps(build_line("é", prompt="ü\ud800")).encode()
    (answer,), _ = await run(engine, [line])
    assert (answer["custom_id"], answer["response"]["status_code"]) == ("é", 200)
    assert engine.requests[0].num_prompt_tokens == 3


Reply = Callable[[Send], Awaitable[None]]


async def break_down(send: Send) -> None:
    raise ZeroDivisionError("a bug")


async def say_nothing(send: Send) -> None:
    pass


async def break_down_late(send: Send) -> None:
    await send_whole(send, b"{}")
    raise ZeroDivisionError("a bug")


async def send_no_json(send: Send) -> None:
    await send_whole(send, b"<html>")


async def send_no_usage(send: Send) -> None:
    await send_whole(send, b'{"choices":[]}')


async def send_whole(send: Send, body: bytes) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": body})


@pytest.mark.parametrize("fail", [break_down, say_nothing, break_down_late, send_no_json, send_no_usage])
async def test_whatever_an_application_does_to_one_line_the_others_are_answered(
    fail: Reply, caplog: pytest.LogCaptureFixture
) -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        prompt = json.loads((await receive())["body"])["prompt"]
        if prompt == "bad":
            await fail(send)
        else:
            await send_whole(send, b'{"usage":{"completion_tokens":2}}')

    written: list[bytes] = []
    runner = BatchRunner(app, window=2, is_engine_dead=lambda: False)
    lines = [build_line("first"), build_line("second", prompt="bad"), build_line("third")]
    tally = await asyncio.wait_for(runner.run(as_lines(lines), written.append), 10)
    first, second, third = map(json.loads, written)
    assert first["response"]["status_code"] == third["response"]["status_code"] == 200
    assert (second["custom_id"], second["response"]) == ("second", None)
    assert second["error"] == {
        "code": "internal_error",
        "message": "The server failed on this line; its log says why.",
        "line": 2,
    }
    assert (tally.num_lines, tally.num_failed, tally.num_output_tokens) == (3, 1, 4)
    assert "batch line 'second' failed" in caplog.text and caplog.records[-1].exc_info is not None


# ---------------------------------------------------------------------- the window
class GatedEngine(FakeEngineClient):
    """Each request waits until the test opens its gate; requests are known by their prompt's length."""

    def __init__(self) -> None:
        super().__init__(self._wait_for_gate)
        self.gates: dict[int, asyncio.Event] = {}
        self.num_most_at_once = self.num_at_once = 0
        self.changed = asyncio.Event()

    def gate(self, number: int) -> asyncio.Event:
        return self.gates.setdefault(number, asyncio.Event())

    def _wait_for_gate(self, request: GenerationRequest) -> list[ScriptItem]:
        self.changed.set()
        return [self.gate(request.num_prompt_tokens), *say("done")]

    async def wait_for_requests(self, number: int) -> None:
        while len(self.requests) < number:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 5)


async def test_answers_come_in_the_order_of_the_lines_whatever_ends_first() -> None:
    engine = GatedEngine()
    running = asyncio.create_task(run(engine, numbered_lines(3), window=3))
    await engine.wait_for_requests(3)
    for number in (3, 2, 1):
        engine.gate(number).set()
    answers, _ = await running
    assert [answer["custom_id"] for answer in answers] == ["1", "2", "3"]


async def test_no_more_than_the_window_is_in_flight_and_reading_stops_behind_a_slow_line() -> None:
    # Beside the slow line: 4 windows of answers that wait for it, and one that finds no place.
    engine, read, most = GatedEngine(), 0, 1 + 4 * 2 + 1
    has_read_most = asyncio.Event()

    async def count_lines() -> AsyncIterator[bytes]:
        nonlocal read
        for line in numbered_lines(40):
            read += 1
            if read == most:
                has_read_most.set()
            yield json.dumps(line).encode()

    written: list[bytes] = []
    runner = create_runner(engine, 2)
    running = asyncio.create_task(runner.run(count_lines(), written.append))
    await engine.wait_for_requests(2)
    assert len(engine.requests) == 2
    for number in range(2, 41):
        engine.gate(number).set()
    await asyncio.wait_for(has_read_most.wait(), 5)
    await engine.wait_for_requests(most)
    await settle()
    assert (written, read) == ([], most)
    engine.gate(1).set()
    assert (await asyncio.wait_for(running, 5)).num_lines == 40


async def settle() -> None:
    for _ in range(100):
        await asyncio.sleep(0)


async def test_lines_and_the_answers_that_wait_hold_no_more_than_so_many_bytes() -> None:
    engine, lines = GatedEngine(), numbered_lines(12)
    num_bytes = sum(len(json.dumps(line)) for line in lines[:3])
    written: list[bytes] = []
    runner = create_runner(engine, 8, max_held_bytes=num_bytes)
    running = asyncio.create_task(runner.run(as_lines(lines), written.append))
    await engine.wait_for_requests(3)
    await settle()
    assert len(engine.requests) == 3
    for number in (2, 3):
        engine.gate(number).set()  # their answers wait for the first one's, and are longer than their lines
    await settle()
    assert (len(engine.requests), written) == (3, [])
    for number in range(1, 13):
        engine.gate(number).set()
    assert (await asyncio.wait_for(running, 10)).num_failed == 0
    assert [json.loads(line)["custom_id"] for line in written] == [line["custom_id"] for line in lines]


async def test_a_line_that_is_larger_than_all_that_may_be_held_goes_through_alone() -> None:
    engine, written = GatedEngine(), list[bytes]()
    running = asyncio.create_task(
        create_runner(engine, 8, max_held_bytes=1).run(as_lines(numbered_lines(3)), written.append)
    )
    for number in range(1, 4):
        await engine.wait_for_requests(number)
        await settle()
        assert len(engine.requests) == number
        engine.gate(number).set()
    assert (await asyncio.wait_for(running, 10)).num_failed == 0


async def test_a_cancelled_batch_aborts_what_is_in_flight() -> None:
    engine = GatedEngine()
    running = asyncio.create_task(run(engine, numbered_lines(5), window=2))
    await engine.wait_for_requests(2)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(engine.aborted) == 2


async def test_what_reading_or_writing_raises_ends_the_batch() -> None:
    async def fail() -> AsyncIterator[bytes]:
        yield json.dumps(build_line("a")).encode()
        raise BatchFileError("The disk is gone.")

    def refuse(line: bytes) -> None:
        raise BatchFileError("The disk is full.")

    written: list[bytes] = []
    with pytest.raises(BatchFileError, match="gone"):
        await create_runner(FakeEngineClient(), 2).run(fail(), written.append)
    assert len(written) == 1
    with pytest.raises(BatchFileError, match="full"):
        await create_runner(FakeEngineClient(), 2).run(as_lines(numbered_lines(9)), refuse)


async def test_when_the_engine_dies_every_line_without_an_answer_says_so() -> None:
    engine = FakeEngineClient()

    def die(request: GenerationRequest) -> list[ScriptItem]:
        if request.num_prompt_tokens < 2:
            return say("done")
        engine.engine_state = create_state(EnginePhase.DEAD)
        return [EngineDeadError("a step failed")]

    engine.script = die
    answers, tally = await run(engine, numbered_lines(4), window=1)
    assert answers[0]["response"]["status_code"] == 200
    assert [answer["error"]["code"] for answer in answers[1:]] == ["engine_dead"] * 3
    assert [answer["custom_id"] for answer in answers] == ["1", "2", "3", "4"]
    assert (tally.num_failed, len(engine.requests)) == (3, 2)
