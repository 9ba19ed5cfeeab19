"""The whole path, as a user walks it: a real process, the real model, the OpenAI SDK."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest

from tests.e2e.prompts import PROMPTS
from tests.e2e.server_process import ServerProcess

MODEL = "SmolLM2-135M-Instruct"


@pytest.fixture(scope="module")
def server(embedded_model: Path) -> Iterator[ServerProcess]:
    # 16-token blocks do not exist on the CPU backend; a small pool keeps the test's memory low.
    with ServerProcess("--num-kv-blocks", "256", "--max-num-seqs", "32") as process:
        yield process


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as sdk:
        yield sdk


def test_the_start_ends_in_a_curl_that_works(server: ServerProcess) -> None:
    server.wait_until(lambda: "curl " in server.output, 10)
    curl = next(line for line in server.lines if "curl " in line)
    assert server.url in curl
    body = json.loads(curl.split("-d '")[1].rsplit("'", 1)[0])
    path = curl.split(server.url)[1].split()[0]
    assert httpx.post(server.url + path, json=body, timeout=120).status_code == 200


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).object == "model"


def test_completion_stream_equals_the_whole(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "prompt": "The capital of France is", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**options)  # type: ignore[call-overload]
    assert "Paris" in whole.choices[0].text
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert chunks[-1].choices == []
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens == 5
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    assert whole.choices[0].finish_reason == "length"


def test_chat_stream_equals_the_whole(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": "Say hello in one short sentence."}]
    options = {"model": MODEL, "messages": messages, "max_tokens": 40, "temperature": 0}
    whole = client.chat.completions.create(**options)  # type: ignore[call-overload]
    stream = list(client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True}))  # type: ignore[call-overload]
    deltas = [chunk.choices[0] for chunk in stream if chunk.choices]
    assert deltas[0].delta.role == "assistant"
    assert "".join(choice.delta.content or "" for choice in deltas) == whole.choices[0].message.content
    assert [choice.finish_reason for choice in deltas if choice.finish_reason] == [whole.choices[0].finish_reason]
    assert stream[-1].usage.total_tokens == whole.usage.total_tokens


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="1, 2, 3, 4,", max_tokens=30, temperature=0, stop=["9"])
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].text.rstrip().endswith("8,")


def test_a_seed_repeats_and_its_absence_does_not(client: openai.OpenAI) -> None:
    def draw(seed: int | None) -> str:
        return (
            client.completions.create(model=MODEL, prompt="My favourite", max_tokens=16, temperature=1.5, seed=seed)
            .choices[0]
            .text
        )

    assert draw(7) == draw(7)
    assert len({draw(None) for _ in range(4)}) > 1


async def ask(client: openai.AsyncOpenAI, prompt: str, max_tokens: int) -> str:
    stream = await client.completions.create(
        model=MODEL, prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True
    )
    return "".join([chunk.choices[0].text async for chunk in stream])


async def test_32_streams_at_once_give_the_text_that_each_gives_alone(server: ServerProcess) -> None:
    prompts = [*PROMPTS, *(f"{prompt}\n\nAgain: {prompt}" for prompt in PROMPTS[:12])]
    assert len(prompts) == 32
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="unused", max_retries=0) as client:
        alone = [await ask(client, prompt, 24) for prompt in prompts]
        together = await asyncio.gather(*(ask(client, prompt, 24) for prompt in prompts))
    assert together == alone


async def test_a_disconnect_aborts_and_frees_everything(server: ServerProcess) -> None:
    before = server.metric("vllm:generation_tokens_total")
    body = {
        "model": MODEL,
        "prompt": "Count:",
        "max_tokens": 4000,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    async with (
        httpx.AsyncClient() as client,
        client.stream("POST", server.url + "/v1/completions", json=body) as response,
    ):
        await anext(response.aiter_lines())
    server.wait_until(lambda: server.metric("vllm:num_requests_running") == 0, 5)
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.metric("vllm:generation_tokens_total") - before < 500


async def test_a_disconnect_of_a_plain_request_aborts_too(server: ServerProcess) -> None:
    body = {"model": MODEL, "prompt": "Count:", "max_tokens": 4000, "temperature": 0, "ignore_eos": True}
    async with httpx.AsyncClient() as client:
        with pytest.raises(httpx.ReadTimeout):
            await client.post(server.url + "/v1/completions", json=body, timeout=1.0)
    server.wait_until(lambda: server.metric("vllm:num_requests_running") == 0, 5)
    assert server.metric("vllm:request_success_total") > 0


def test_health_ready_version_and_metrics(server: ServerProcess) -> None:
    assert httpx.get(server.url + "/health").status_code == 200
    assert httpx.get(server.url + "/ready").status_code == 200
    assert httpx.get(server.url + "/version").json()["version"]
    page = httpx.get(server.url + "/metrics").text
    for name in (
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
        "vllm:kv_cache_usage_perc",
        "vllm:prompt_tokens_total",
        "vllm:generation_tokens_total",
        "vllm:time_to_first_token_seconds_bucket",
    ):
        assert f"\n{name}{{" in page


def test_a_prompt_beyond_the_context_is_refused_with_its_numbers(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt="word " * 9000, max_tokens=1)
    assert caught.value.code == "context_length_exceeded"
    assert "8192" in caught.value.message
    assert "9000" in caught.value.message or "9001" in caught.value.message


def test_sigterm_ends_cleanly(embedded_model: Path) -> None:
    with ServerProcess("--num-kv-blocks", "16") as process:
        pass
    assert process.process.returncode == 0
    assert "Traceback" not in process.output
