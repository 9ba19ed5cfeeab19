from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from engine_core import EngineDeadError, EnginePhase, FinishReason, TokenLogprobs
from server.generation import GenerationOutput, GenerationRequest, TokenText
from server.streaming import StreamTiming
from tests.server.fake_engine_client import FakeEngineClient, ScriptItem, create_state, say
from tests.server.http_helpers import MODEL, build_app, connect, get_chunks, get_events, serve

PATH = "/v1/completions"


async def test_a_whole_answer() -> None:
    engine = FakeEngineClient(lambda request: say("Hel", "lo", num_cached_tokens=2))
    async with connect(build_app(engine)) as client:
        response = await client.post(PATH, json={"prompt": "abc", "model": MODEL})
    body = response.json()
    assert body.pop("id").startswith("cmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "text_completion",
        "model": MODEL,
        "system_fingerprint": "fp_test",
        "choices": [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 2,
            "total_tokens": 6,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
    assert engine.aborted == []


async def test_a_stream_says_the_same_as_a_whole_answer() -> None:
    engine = FakeEngineClient(lambda request: say("Hel", "", "lo", "", finish_reason=FinishReason.LENGTH))
    async with connect(build_app(engine)) as client:
        whole = (await client.post(PATH, json={"prompt": "abc"})).json()
        asked = {"prompt": "abc", "stream": True, "stream_options": {"include_usage": True}}
        response = await client.post(PATH, json=asked)
        *chunks, last = await get_chunks(response)
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"
    assert "content-length" not in response.headers
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in [*chunks, last]}) == 1
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert all(chunk["usage"] is None for chunk in chunks)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["Hel", "lo", ""]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, "length"]
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert whole["choices"][0]["text"] == "Hello"


async def test_without_include_usage_no_chunk_speaks_of_it() -> None:
    async with connect(build_app(FakeEngineClient())) as client:
        chunks = await get_chunks(await client.post(PATH, json={"prompt": "abc", "stream": True}))
    assert not any("usage" in chunk for chunk in chunks)


async def test_the_stop_that_ended_it_is_told() -> None:
    script = [GenerationOutput("x", 1, finish_reason=FinishReason.STOP, stop_reason="END")]
    async with connect(build_app(FakeEngineClient(lambda request: script))) as client:
        body = (await client.post(PATH, json={"prompt": "a", "stop": "END"})).json()
    assert (body["choices"][0]["finish_reason"], body["choices"][0]["stop_reason"]) == ("stop", "END")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_each_prompt_of_a_list_is_a_choice(is_stream: bool) -> None:
    def script(request: GenerationRequest) -> list[ScriptItem]:
        return say(*[str(token_id) for token_id in request.engine_request.prompt_token_ids])

    fields = {"prompt": [[5], [6, 7], [8]], "stream": is_stream}
    fields |= {"stream_options": {"include_usage": True}} if is_stream else {}
    async with connect(build_app(FakeEngineClient(script))) as client:
        response = await client.post(PATH, json=fields)
        texts = {0: "", 1: "", 2: ""}
        pieces = await get_chunks(response) if is_stream else [response.json()]
    for piece in pieces:
        for choice in piece["choices"]:
            texts[choice["index"]] += choice["text"]
    assert texts == {0: "5", 1: "67", 2: "8"}
    usage = pieces[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 4, 8)


# ---------------------------------------------------------------------- failures
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("item", "status", "code"),
    [
        (EngineDeadError("gone"), 503, "engine_dead"),
        (GenerationOutput("", 0, FinishReason.ERROR, error="The logits are not finite."), 500, "internal_error"),
        (GenerationOutput("", 0, FinishReason.ABORT), 503, "aborted"),
        (RuntimeError("a bug"), 500, "internal_error"),
    ],
)
async def test_an_early_failure_has_a_status(item: ScriptItem, status: int, code: str, is_stream: bool) -> None:
    async with connect(build_app(FakeEngineClient(lambda request: [item]))) as client:
        response = await client.post(PATH, json={"prompt": "a", "stream": is_stream})
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)


async def test_a_late_failure_is_an_error_event_and_then_done() -> None:
    script = [*say("a", "b")[:1], EngineDeadError("gone")]
    async with connect(build_app(FakeEngineClient(lambda request: script))) as client:
        response = await client.post(PATH, json={"prompt": "a", "stream": True})
        _, error, end = await get_chunks_and_end(response)
    assert response.status_code == 200
    assert error["error"]["code"] == "engine_dead"
    assert end == "[DONE]"


async def get_chunks_and_end(response: httpx.Response) -> tuple[dict[str, Any], dict[str, Any], str]:
    events = await get_events(response)
    chunk, error = [httpx.Response(200, text=event).json() for event in events[:2]]
    return chunk, error, events[2]


async def test_a_failure_of_one_prompt_aborts_the_others() -> None:
    def script(request: GenerationRequest) -> list[ScriptItem]:
        is_bad = request.engine_request.prompt_token_ids == [6]
        return [GenerationOutput("", 0, FinishReason.ERROR, error="Bad.")] if is_bad else [asyncio.Event()]

    engine = FakeEngineClient(script)
    async with connect(build_app(engine)) as client:
        response = await client.post(PATH, json={"prompt": [[5], [6], [7]]})
    assert response.status_code == 500
    assert sorted(name[-2:] for name in engine.aborted) == ["-0", "-2"]


async def test_while_loading_nothing_is_asked_of_the_engine() -> None:
    engine = FakeEngineClient(state=create_state(EnginePhase.LOADING, progress=0.5))
    async with connect(build_app(engine)) as client:
        response = await client.post(PATH, json={"prompt": "a"})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "not_ready")
    assert response.headers["retry-after"] == "2"
    assert engine.requests == []


async def test_a_prompt_over_the_context_is_refused_with_openais_code() -> None:
    async with connect(build_app(FakeEngineClient())) as client:
        response = await client.post(PATH, json={"prompt": "a" * 100, "max_tokens": 7})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", "prompt")
    assert all(number in error["message"] for number in ("101", "7", "64"))


@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
async def test_a_priority_is_honoured_or_refused_never_ignored(path: str) -> None:
    engine = FakeEngineClient()
    body = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "priority": 5}
    async with connect(build_app(engine, has_priorities=True)) as client:
        assert (await client.post(path, json=body)).status_code == 200
    assert [request.engine_request.priority for request in engine.requests] == [5]
    async with connect(build_app(engine)) as client:
        refused = await client.post(path, json=body)
        assert (await client.post(path, json={**body, "priority": 0})).status_code == 200
    error = refused.json()["error"]
    assert (refused.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", "priority")


# ---------------------------------------------------------------------- time
async def test_headers_wait_for_the_first_token_and_then_pings_fill_the_silence() -> None:
    may_speak = asyncio.Event()
    engine = FakeEngineClient(lambda request: [may_speak, *say("late")])
    app = build_app(engine, timing=StreamTiming(header_wait_s=0.01, ping_interval_s=0.01))
    async with serve(app) as url, stream_from(url) as response:
        # The headers came although nothing was said yet.
        assert response.status_code == 200
        lines = response.aiter_lines()
        comments = [line async for line in take_lines(lines, 4)]
        assert comments == [": ping", "", ": ping", ""]
        may_speak.set()
        rest = [line async for line in lines if line.startswith("data")]
    assert rest[-1] == "data: [DONE]"
    assert engine.aborted == []


async def take_lines(lines: Any, count: int) -> Any:
    for _ in range(count):
        yield await anext(lines)


@asynccontextmanager
async def stream_from(url: str) -> AsyncIterator[httpx.Response]:
    body = {"prompt": "a", "stream": True}
    async with httpx.AsyncClient(base_url=url) as client, client.stream("POST", PATH, json=body) as response:
        yield response


async def test_chunks_leave_as_they_come() -> None:
    may_go_on = asyncio.Event()
    first, second = say("one", "two")
    engine = FakeEngineClient(lambda request: [first, may_go_on, second])
    async with serve(build_app(engine)) as url, stream_from(url) as response:
        lines = response.aiter_lines()
        assert '"one"' in await anext(lines)
        may_go_on.set()
        rest = [line async for line in lines]
    assert any('"two"' in line for line in rest)


# ---------------------------------------------------------------------- clients that leave
async def wait_for_abort(engine: FakeEngineClient) -> None:
    async with asyncio.timeout(5):
        await engine.has_aborted.wait()


@pytest.mark.parametrize("has_first_token", [False, True])
async def test_a_client_that_leaves_a_stream_aborts_it_and_is_no_error(
    has_first_token: bool, caplog: pytest.LogCaptureFixture
) -> None:
    never = asyncio.Event()
    items: list[ScriptItem] = [*say("one", "two")[:1], never] if has_first_token else [never]
    engine = FakeEngineClient(lambda request: items)
    app = build_app(engine, timing=StreamTiming(header_wait_s=0.01))
    async with serve(app) as url, httpx.AsyncClient(base_url=url) as client:
        async with client.stream("POST", PATH, json={"prompt": "a", "stream": True}):
            assert engine.aborted == []
        await wait_for_abort(engine)
    assert engine.aborted == [engine.requests[0].engine_request.request_id]
    assert [record.name for record in caplog.records if record.levelno >= logging.WARNING] == []


@pytest.mark.parametrize("prompt", ["a", ["a", "b"]])
async def test_a_client_that_leaves_while_it_waits_aborts_its_requests(prompt: Any) -> None:
    has_begun, never = asyncio.Event(), asyncio.Event()

    def script(request: GenerationRequest) -> list[ScriptItem]:
        has_begun.set()
        return [never]

    engine = FakeEngineClient(script)
    async with serve(build_app(engine)) as url, httpx.AsyncClient(base_url=url) as client:
        post = asyncio.create_task(client.post(PATH, json={"prompt": prompt}))
        await has_begun.wait()
        post.cancel()
        await asyncio.gather(post, return_exceptions=True)
        await wait_for_abort(engine)
    assert sorted(engine.aborted) == sorted(request.engine_request.request_id for request in engine.requests)


async def test_a_pipelined_keep_alive_connection_serves_again_after_a_stream() -> None:
    async with serve(build_app(FakeEngineClient())) as url, httpx.AsyncClient(base_url=url) as client:
        for _ in range(3):
            response = await client.post(PATH, json={"prompt": "a", "stream": True})
            assert (await get_events(response))[-1] == "[DONE]"


# ---------------------------------------------------------------------- the SDK
async def test_the_openai_client_reads_both_forms() -> None:
    engine = FakeEngineClient(lambda request: say("Hé", "llo 😀", num_cached_tokens=1))
    async with serve(build_app(engine)) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        whole = await client.completions.create(model=MODEL, prompt="abc")
        stream = await client.completions.create(
            model=MODEL, prompt="abc", stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    assert whole.choices[0].text == "Héllo 😀"
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == "Héllo 😀"
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.total_tokens == 6


async def test_the_openai_client_raises_its_own_errors() -> None:
    script = [*say("a", "b")[:1], EngineDeadError("gone")]
    engine = FakeEngineClient(lambda request: script)
    sdk = functools.partial(openai.AsyncOpenAI, api_key="none", max_retries=0)
    async with serve(build_app(engine)) as url, sdk(base_url=f"{url}/v1") as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="other", prompt="abc")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model=MODEL, prompt="abc", suffix="x")
        stream = await client.completions.create(model=MODEL, prompt="abc", stream=True)
        with pytest.raises(openai.APIError, match="engine has stopped"):
            async for _ in stream:
                pass
    assert (missing.value.code, refused.value.code, refused.value.param) == (
        "model_not_found",
        "unsupported_parameter",
        "suffix",
    )


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_follower_that_is_ahead_waits_for_its_prompts_logprobs(is_stream: bool) -> None:
    leader_may_speak = asyncio.Event()

    def script(request: GenerationRequest) -> list[ScriptItem]:
        if request.choice == 1:
            # After all that the follower has to say, which is there at once.
            asyncio.get_running_loop().call_later(0.05, leader_may_speak.set)
            return say("b1", "b2")
        token = TokenText(ord("a"), b"a", 0, -0.5, 1)
        prompt_logprobs = [TokenLogprobs(ord("p"), -0.25, 1), TokenLogprobs(ord("q"), -0.75, 1)]
        end = GenerationOutput("a", 1, FinishReason.STOP, tokens=(token,), prompt_logprobs=prompt_logprobs)
        return [leader_may_speak, end]

    engine = FakeEngineClient(script)
    body = {"prompt": "pq", "n": 2, "echo": True, "logprobs": 0, "stream": is_stream}
    async with connect(build_app(engine)) as client:
        response = await client.post(PATH, json=body)
        pieces = await get_chunks(response) if is_stream else [response.json()]
    texts, offsets = {0: "", 1: ""}, {0: list[int](), 1: list[int]()}
    for piece in pieces:
        for choice in piece["choices"]:
            texts[choice["index"]] += choice["text"]
            offsets[choice["index"]] += choice["logprobs"]["text_offset"]
    assert texts == {0: "pqa", 1: "pqb1b2"}
    assert offsets == {0: [0, 0, 1, 2], 1: [0, 0, 1]}
