from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from starlette.types import Message

from engine_core import EngineDeadError, FinishReason
from server.generation import GenerationOutput
from tests.server.fake_engine_client import FakeEngineClient, say
from tests.server.http_helpers import MODEL, FakeTemplate, build_app, connect, get_chunks, serve

PATH = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
WITH_USAGE = {"stream": True, "stream_options": {"include_usage": True}}


async def test_a_whole_answer() -> None:
    engine = FakeEngineClient(lambda request: say("Hel", "lo", finish_reason=FinishReason.LENGTH))
    async with connect(build_app(engine)) as client:
        body = (await client.post(PATH, json={"messages": MESSAGES})).json()
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    num_prompt_tokens = len("user:hi|assistant:")
    assert body == {
        "object": "chat.completion",
        "model": MODEL,
        "system_fingerprint": "fp_test",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
                "stop_reason": None,
            }
        ],
        "usage": {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": 2,
            "total_tokens": num_prompt_tokens + 2,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }


async def test_a_stream_is_role_text_finish_usage_done() -> None:
    engine = FakeEngineClient(lambda request: say("Hel", "", "lo"))
    async with connect(build_app(engine)) as client:
        whole = (await client.post(PATH, json={"messages": MESSAGES})).json()
        *chunks, last = await get_chunks(await client.post(PATH, json={"messages": MESSAGES, **WITH_USAGE}))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [choice["delta"] for choice in choices] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert [choice["finish_reason"] for choice in choices] == [None, None, None, "stop"]
    assert {chunk["object"] for chunk in [*chunks, last]} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"]) for chunk in [*chunks, last]}) == 1
    assert all(chunk["usage"] is None for chunk in chunks)
    assert (last["choices"], last["usage"]) == ([], whole["usage"])


async def test_an_answer_without_text_still_has_a_role_and_an_end() -> None:
    engine = FakeEngineClient(lambda request: [GenerationOutput("", 1, FinishReason.STOP)])
    async with connect(build_app(engine)) as client:
        chunks = await get_chunks(await client.post(PATH, json={"messages": MESSAGES, "stream": True}))
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [{"role": "assistant", "content": ""}, {}]


async def test_no_role_is_sent_before_the_engine_has_spoken() -> None:
    engine = FakeEngineClient(lambda request: [EngineDeadError("gone")])
    async with connect(build_app(engine)) as client:
        response = await client.post(PATH, json={"messages": MESSAGES, "stream": True})
    assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")


async def test_a_model_without_a_template_says_so() -> None:
    async with connect(build_app(FakeEngineClient(), has_template=False)) as client:
        response = await client.post(PATH, json={"messages": MESSAGES})
        assert (await client.post("/v1/completions", json={"prompt": "a"})).status_code == 200
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages")
    assert "/v1/completions" in error["message"]


async def test_the_templates_sentence_reaches_the_client() -> None:
    async with connect(build_app(FakeEngineClient())) as client:
        response = await client.post(PATH, json={"messages": MESSAGES * 2})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == "Roles must alternate."


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"chat_template": "x"}, "chat_template"),
        ({"functions": [{}]}, "functions"),
        ({"continue_final_message": True}, "continue_final_message"),
    ],
)
async def test_what_is_not_supported_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    async with connect(build_app(FakeEngineClient())) as client:
        response = await client.post(PATH, json={"messages": MESSAGES, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["param"]) == (400, "unsupported_parameter", param)


async def test_many_streams_at_once_all_end() -> None:
    engine = FakeEngineClient(lambda request: say(*["some", "words", "to", "say"]))
    async with serve(build_app(engine)) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:

        async def ask() -> str:
            stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)  # type: ignore[call-overload]
            return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

        answers = await asyncio.gather(*(ask() for _ in range(32)))
    assert set(answers) == {"somewordstosay"}
    assert engine.aborted == []


async def test_the_openai_client_reads_both_forms() -> None:
    engine = FakeEngineClient(lambda request: say("Hé", "llo 😀"))
    async with serve(build_app(engine)) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES)  # type: ignore[call-overload]
        async with client.chat.completions.stream(
            model=MODEL, messages=MESSAGES, stream_options={"include_usage": True}
        ) as stream:  # type: ignore[arg-type]
            final = await stream.get_final_completion()
    assert whole.choices[0].message.content == final.choices[0].message.content == "Héllo 😀"
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason == "stop"
    assert final.usage == whole.usage


async def test_the_openai_client_lists_models() -> None:
    app = build_app(FakeEngineClient())
    async with serve(app) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL


async def test_a_client_that_leaves_aborts_its_chat() -> None:
    never = asyncio.Event()
    engine = FakeEngineClient(lambda request: [*say("one", "two")[:1], never])
    async with serve(build_app(engine)) as url, openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)  # type: ignore[call-overload]
        await anext(aiter(stream))
        await stream.close()
        async with asyncio.timeout(5):
            await engine.has_aborted.wait()
    assert engine.aborted == [engine.requests[0].engine_request.request_id]


class PatientTemplate(FakeTemplate):
    """Renders when it is let; remembers the first letter of each conversation."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.has_begun = asyncio.Event()
        self.may_go_on = threading.Event()
        self.letters: list[str] = []

    def render(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
        self.letters.append(messages[0]["content"][0])
        self.loop.call_soon_threadsafe(self.has_begun.set)
        assert self.may_go_on.wait(5)
        return super().render(messages, add_generation_prompt)


async def test_a_long_chat_that_waits_for_its_turn_is_dropped_when_its_client_leaves() -> None:
    template = PatientTemplate()
    app = build_app(FakeEngineClient(), template=template)
    bodies = [json.dumps({"messages": [{"role": "user", "content": "b" * 300_000}]}).encode()]

    async def receive() -> Message:
        if bodies:
            return {"type": "http.request", "body": bodies.pop(), "more_body": False}
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        assert message.get("status") != 200

    async with asyncio.timeout(5), connect(app) as client:
        first = asyncio.create_task(client.post(PATH, json={"messages": [{"role": "user", "content": "a" * 300_000}]}))
        await template.has_begun.wait()
        try:
            scope = {"type": "http", "method": "POST", "path": PATH, "headers": [], "query_string": b""}
            await app(scope, receive, send)
        finally:
            template.may_go_on.set()
        await first
    assert template.letters == ["a"]
