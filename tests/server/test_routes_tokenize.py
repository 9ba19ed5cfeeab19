from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from engine_core import EnginePhase
from server.overload.limits import Limits
from tests.server.fake_engine_client import FakeEngineClient, create_state
from tests.server.http_helpers import MODEL, FakeMetrics, FakeTokenizer, build_app, connect

USER = {"role": "user", "content": "hé"}


async def post(path: str, body: Any, **parts: Any) -> tuple[int, Any]:
    async with connect(build_app(FakeEngineClient(), **parts)) as client:
        response = await client.post(path, json=body)
    return response.status_code, response.json()


async def test_a_text_costs_what_a_completion_of_it_costs() -> None:
    status, body = await post("/tokenize", {"model": MODEL, "prompt": "ab"})
    assert (status, body["tokens"], body["count"], body["max_model_len"]) == (200, [1, 97, 98], 3, 64)
    assert body["token_strs"] is None


async def test_special_tokens_and_token_texts_are_the_clients_choice() -> None:
    _, body = await post("/tokenize", {"prompt": "aé", "add_special_tokens": False, "return_token_strs": True})
    assert (body["tokens"], body["token_strs"]) == ([97, 233], ["a", "é"])


async def test_a_tokens_text_is_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def show(self: FakeTokenizer, token_id: int) -> bytes:
        asked.append(token_id)
        return chr(token_id).encode()

    monkeypatch.setattr(FakeTokenizer, "token_bytes", show)
    _, body = await post("/tokenize", {"prompt": "abab", "add_special_tokens": False, "return_token_strs": True})
    assert (body["token_strs"], asked) == (["a", "b", "a", "b"], [97, 98])


async def test_a_conversation_goes_through_the_template() -> None:
    _, body = await post("/tokenize", {"messages": [USER]})
    assert body["tokens"] == list(map(ord, "user:hé|assistant:"))
    _, body = await post("/tokenize", {"messages": [USER], "add_generation_prompt": False})
    assert body["tokens"] == list(map(ord, "user:hé|"))


async def test_ids_become_text_again() -> None:
    assert await post("/detokenize", {"tokens": [1, 104, 233]}) == (200, {"prompt": "<s>hé"})
    assert await post("/detokenize", {"tokens": []}) == (200, {"prompt": ""})


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [USER]}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/tokenize", {"messages": [USER], "tools": [{"type": "function"}]}, 400, "tools"),
        ("/tokenize", {"messages": [USER, USER]}, 400, "messages[1]"),
        ("/detokenize", {"tokens": [1000]}, 400, "tokens"),
        ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
        ("/detokenize", {"tokens": "a"}, 400, "tokens"),
        ("/detokenize", {"tokens": [5], "model": "other"}, 404, "model"),
    ],
)
async def test_bad_input_is_refused_by_name(path: str, body: Any, status: int, param: str) -> None:
    code, reply = await post(path, body)
    assert (code, reply["error"]["param"]) == (status, param)


async def test_a_model_without_a_template_refuses_messages_only() -> None:
    assert (await post("/tokenize", {"messages": [USER]}, has_template=False))[0] == 400
    assert (await post("/tokenize", {"prompt": "a"}, has_template=False))[0] == 200


async def test_tokens_are_counted_while_the_model_loads() -> None:
    engine = FakeEngineClient(state=create_state(EnginePhase.LOADING, max_model_len=0))
    async with connect(build_app(engine)) as client:
        response = await client.post("/tokenize", json={"prompt": "a"})
    assert (response.status_code, response.json()["max_model_len"]) == (200, None)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [104]}),
        ("/v1/completions/render", {"prompt": "a"}),
        ("/v1/chat/completions/render", {"messages": [USER]}),
    ],
)
async def test_whatever_turns_text_into_tokens_is_one_of_its_keys_requests_a_minute(
    path: str, body: dict[str, Any]
) -> None:
    metrics = FakeMetrics()
    app = build_app(FakeEngineClient(), limits=Limits(max_requests_per_minute=1), metrics=metrics)
    async with connect(app) as client:
        first, second = [await client.post(path, json=body) for _ in range(2)]
    assert first.status_code == 200, first.text
    assert (second.status_code, second.json()["error"]["code"]) == (429, "rate_limit_exceeded")
    assert int(second.headers["retry-after"]) > 0 and metrics.rejections == ["key_rate"]


@pytest.mark.parametrize("path", ["/tokenize", "/v1/completions/render"])
async def test_ten_texts_to_be_counted_hold_up_no_prompt(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    encode, may_go_on = FakeTokenizer.encode, threading.Event()

    def encode_when_told(self: FakeTokenizer, text: str, *options: Any) -> Any:
        assert not text.startswith("counted") or may_go_on.wait(10)
        return encode(self, text, *options)

    monkeypatch.setattr(FakeTokenizer, "encode", encode_when_told)
    async with connect(build_app(FakeEngineClient())) as client:
        jobs = [asyncio.create_task(client.post(path, json={"prompt": "counted"})) for _ in range(10)]
        await asyncio.sleep(0.05)
        # Too long to be made on the event loop, and too long for the model: what it is told tells that it was made.
        prompt = await asyncio.wait_for(client.post("/v1/completions", json={"prompt": "x" * 100_000}), 5)
        assert prompt.json()["error"]["code"] == "context_length_exceeded"
        assert not any(job.done() for job in jobs)
        may_go_on.set()
        await asyncio.gather(*jobs)
