from __future__ import annotations

from typing import Any

from tests.server.fake_engine_client import FakeEngineClient
from tests.server.http_helpers import MODEL, build_app, connect

USER = {"role": "user", "content": "hi"}


async def post(path: str, body: Any) -> tuple[int, Any, FakeEngineClient]:
    engine = FakeEngineClient()
    async with connect(build_app(engine)) as client:
        response = await client.post(path, json=body)
    return response.status_code, response.json(), engine


async def test_a_completion_becomes_one_engine_request_a_prompt() -> None:
    body = {"prompt": ["ab", [5, 6]], "n": 2, "max_tokens": 3, "min_tokens": 1, "logit_bias": {"5": -1}, "seed": 9}
    status, rendered, engine = await post("/v1/completions/render", body)
    assert status == 200
    assert [each["token_ids"] for each in rendered] == [[1, 97, 98], [5, 6]]
    params = rendered[0]["sampling_params"]
    assert {name: params[name] for name in ("n", "max_tokens", "min_tokens", "seed", "logit_bias")} == {
        "n": 2,
        "max_tokens": 3,
        "min_tokens": 1,
        "seed": 9,
        "logit_bias": {"5": -1.0},
    }
    assert (rendered[0]["model"], rendered[0]["stream"]) == (MODEL, False)
    assert engine.requests == []


async def test_a_conversation_becomes_one() -> None:
    status, rendered, engine = await post("/v1/chat/completions/render", {"messages": [USER], "temperature": 0})
    assert (status, rendered["prompt"]) == (200, "user:hi|assistant:")
    assert rendered["token_ids"] == list(map(ord, rendered["prompt"]))
    assert (rendered["sampling_params"]["temperature"], rendered["sampling_params"]["max_tokens"]) == (0.0, 46)
    assert engine.requests == []


async def test_what_a_generating_endpoint_refuses_is_refused_here_too() -> None:
    for path, body, status in (
        ("/v1/completions/render", {"prompt": "x" * 100}, 400),
        ("/v1/completions/render", {"prompt": "x", "model": "other"}, 404),
        ("/v1/chat/completions/render", {"messages": [USER, USER]}, 400),
    ):
        assert (await post(path, body))[0] == status
