"""Each sampling field does what it says on the real model, over HTTP, and with neighbours that ask for other things."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.server_process import ServerProcess

PROMPT = "The capital of France is"


@pytest.fixture(scope="module")
def server(embedded_model: Path) -> Iterator[ServerProcess]:
    # The reference backend: a token's logits do not depend on the batch there, so answers can be compared bit by bit.
    flags = (
        "--backend",
        "torch",
        "--dtype",
        "fp32",
        "--num-threads",
        "1",
        "--num-kv-blocks",
        "128",
        "--max-num-seqs",
        "16",
    )
    with ServerProcess(*flags, "--max-model-len", "512") as process:
        yield process


def complete(server: ServerProcess, **fields: Any) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0, **fields}
    reply = httpx.post(server.url + "/v1/completions", json=body, timeout=120)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def get_text(server: ServerProcess, **fields: Any) -> str:
    text: str = complete(server, **fields)["choices"][0]["text"]
    return text


def get_ids(server: ServerProcess, text: str) -> list[int]:
    body = {"prompt": text, "add_special_tokens": False}
    ids: list[int] = httpx.post(server.url + "/tokenize", json=body, timeout=30).json()["tokens"]
    return ids


def test_a_bias_bans_a_token_or_forces_it(server: ServerProcess) -> None:
    (paris,), (rome,) = get_ids(server, " Paris"), get_ids(server, " Rome")
    assert get_text(server, max_tokens=1) == " Paris"
    assert get_text(server, max_tokens=1, logit_bias={str(paris): -100}) != " Paris"
    assert get_text(server, max_tokens=3, logit_bias={str(rome): 100}) == " Rome Rome Rome"


def test_penalties_end_repetition(server: ServerProcess) -> None:
    prompt = "The cat sat. The cat sat. The cat sat. The cat sat."
    plain = get_text(server, prompt=prompt, max_tokens=20).split()
    assert len(set(plain)) < len(plain) / 2
    for field, value in (("repetition_penalty", 2.0), ("frequency_penalty", 2.0), ("presence_penalty", 2.0)):
        words = get_text(server, prompt=prompt, max_tokens=20, **{field: value}).split()
        assert len(set(words)) > len(set(plain)), field


def test_an_answer_of_min_tokens_goes_on_past_its_end(server: ServerProcess) -> None:
    chat = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    short = complete(server, prompt=chat, max_tokens=60)
    assert short["choices"][0]["finish_reason"] == "stop"
    num_tokens = short["usage"]["completion_tokens"]
    longer = complete(server, prompt=chat, max_tokens=60, min_tokens=num_tokens + 5)
    assert longer["usage"]["completion_tokens"] >= num_tokens + 5
    assert longer["choices"][0]["text"].startswith(short["choices"][0]["text"])
    endless = complete(server, prompt=chat, max_tokens=num_tokens + 3, ignore_eos=True)
    assert endless["choices"][0]["finish_reason"] == "length"


def test_top_k_of_one_a_tiny_nucleus_and_a_min_p_of_one_are_greedy(server: ServerProcess) -> None:
    greedy = get_text(server)
    for fields in ({"top_k": 1}, {"top_p": 0}, {"top_p": 1e-6}, {"min_p": 1}):
        assert get_text(server, temperature=1.5, seed=3, **fields) == greedy, fields


def test_a_stop_is_shown_where_it_is_wanted(server: ServerProcess) -> None:
    hidden = complete(server, stop=["Par"])["choices"][0]
    assert (hidden["text"], hidden["finish_reason"], hidden["stop_reason"]) == (" ", "stop", "Par")
    assert get_text(server, stop=["Par"], include_stop_str_in_output=True) == " Par"
    (paris,) = get_ids(server, " Paris")
    by_id = complete(server, stop_token_ids=[paris])["choices"][0]
    assert (by_id["text"], by_id["finish_reason"], by_id["stop_reason"]) == ("", "stop", paris)
    assert get_text(server, stop_token_ids=[paris], include_stop_str_in_output=True) == " Paris"


def test_an_echos_logprobs_are_those_of_scoring_the_text(server: ServerProcess) -> None:
    """What an evaluation harness relies on: the answer's logprobs, and the same when its text is scored later."""
    told = complete(server, logprobs=3, echo=True)["choices"][0]
    scored = complete(server, prompt=told["text"], logprobs=3, echo=True, max_tokens=0)
    choice = scored["choices"][0]
    assert scored["usage"]["completion_tokens"] == 0
    assert choice["text"] == told["text"]
    for name in ("tokens", "text_offset"):
        assert choice["logprobs"][name] == told["logprobs"][name]
    first, *rest = choice["logprobs"]["token_logprobs"]
    assert first is None
    assert rest == told["logprobs"]["token_logprobs"][1:]
    for offset, token in zip(choice["logprobs"]["text_offset"], choice["logprobs"]["tokens"], strict=True):
        assert told["text"][offset:].startswith(token)


def test_logprobs_are_of_the_model_whatever_bends_the_draw(server: ServerProcess) -> None:
    plain = complete(server, logprobs=2, max_tokens=1)["choices"][0]["logprobs"]
    fields = {"temperature": 2, "top_p": 1e-6, "logit_bias": {"5": 3}, "presence_penalty": 1}
    bent = complete(server, logprobs=2, max_tokens=1, **fields)["choices"][0]["logprobs"]
    assert bent == plain
    assert sum(math.exp(logprob) for logprob in plain["top_logprobs"][0].values()) < 1


async def test_a_seeded_answer_is_the_same_alone_and_among_neighbours_of_every_kind(server: ServerProcess) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "temperature": 1.2, "top_p": 0.95, "seed": 11, "n": 2, "logprobs": 1}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 2},
        {"repetition_penalty": 1.5},
        {"logit_bias": {"7": 5}},
        {"top_k": 3, "seed": 11},
        {"min_p": 0.2, "min_tokens": 3},
        {"logprobs": 5, "echo": True},
    ]
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:

        async def ask(fields: dict[str, Any]) -> Any:
            reply = await client.post("/v1/completions", json=fields)
            assert reply.status_code == 200, reply.text
            return reply.json()["choices"]

        alone = await ask(body)
        neighbours = [{"prompt": f"Once upon a {kind}", "max_tokens": 20, **kind} for kind in kinds]
        *_, crowded = await asyncio.gather(*map(ask, neighbours), ask(body))
        (only,) = await ask({**body, "n": 1})
    assert crowded == alone
    assert alone[0]["text"] != alone[1]["text"]
    assert only == alone[0]
