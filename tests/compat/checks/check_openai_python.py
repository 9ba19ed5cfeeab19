"""openai-python against a running server: `check_openai_python.py URL`."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import openai_python_completions  # noqa: F401  (its checks come with it)
from checking import check, count_aborts, equal, holds, raises, run_checks, wait_until_idle
from openai import AsyncOpenAI, BadRequestError, NotFoundError
from openai_python_asks import COUNT, MODEL, URL, chat, client, complete


@check
def models_are_listed_and_found() -> None:
    equal([model.id for model in client.models.list()], [MODEL])
    equal(client.models.retrieve(MODEL).id, MODEL)
    equal(raises(NotFoundError, lambda: client.models.retrieve("no-such-model")).code, "model_not_found")


@check
def chat_whole() -> None:
    answer = chat(max_tokens=12)
    holds(answer.id.startswith("chatcmpl-"), answer.id)
    equal(answer.model, MODEL)
    equal(len(answer.choices), 1)
    holds(answer.choices[0].message.content, answer)
    equal(answer.choices[0].message.role, "assistant")
    equal(answer.choices[0].finish_reason, "length")
    equal(answer.choices[0].logprobs, None)
    equal(answer.usage.completion_tokens, 12)
    equal(answer.usage.total_tokens, answer.usage.prompt_tokens + 12)


@check
def chat_stream_says_the_same_with_usage() -> None:
    whole = chat(max_tokens=12)
    *chunks, last = chat(max_tokens=12, stream=True, stream_options={"include_usage": True})
    equal("".join(chunk.choices[0].delta.content or "" for chunk in chunks), whole.choices[0].message.content)
    equal(chunks[0].choices[0].delta.role, "assistant")
    equal([c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason], ["length"])
    equal({chunk.usage for chunk in chunks}, {None})
    equal(last.choices, [])
    equal(last.usage.completion_tokens, whole.usage.completion_tokens)
    equal(last.usage.prompt_tokens, whole.usage.prompt_tokens)
    equal(len({(chunk.id, chunk.created, chunk.model) for chunk in [*chunks, last]}), 1)


@check
def chat_stream_helper_sums_up_the_stream() -> None:
    text = chat(max_tokens=24).choices[0].message.content
    # The helper raises at an answer that its limit cut off; one that a stop string ended is complete.
    fields: dict[str, Any] = {"messages": COUNT, "temperature": 0, "stop": text[12:16]}
    with client.chat.completions.stream(model=MODEL, **fields) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    holds({"chunk", "content.delta", "content.done"} <= kinds, kinds)
    equal(final.choices[0].message.content, text[: text.index(text[12:16])])


@check
def chat_takes_text_parts_names_and_developer_messages() -> None:
    parts = [{"type": "text", "text": "Count from one "}, {"type": "text", "text": "to one hundred."}]
    equal(
        chat(messages=[{"role": "user", "content": parts}], max_tokens=8).choices[0].message.content,
        chat(max_tokens=8).choices[0].message.content,
    )
    messages = [{"role": "developer", "content": "Be brief."}, {"role": "user", "name": "ann", "content": "Hello"}]
    holds(chat(messages=messages, max_tokens=8).choices[0].message.content)


@check
def n_choices_whole_and_streamed() -> None:
    fields: dict[str, Any] = {"n": 2, "temperature": 1, "seed": 5, "max_tokens": 12, "extra_body": {"ignore_eos": True}}
    whole = chat(**fields)
    equal([choice.index for choice in whole.choices], [0, 1])
    texts = [choice.message.content for choice in whole.choices]
    holds(texts[0] != texts[1], texts)
    equal(whole.usage.completion_tokens, 24)
    streamed, ends = ["", ""], [0, 0]
    for chunk in chat(**fields, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            ends[choice.index] += choice.finish_reason is not None
    equal(streamed, texts)
    equal(ends, [1, 1])


@check
def a_seed_repeats_an_answer() -> None:
    def ask(seed: int) -> str:
        text: str = chat(temperature=1, seed=seed, max_tokens=12).choices[0].message.content
        return text

    first = ask(7)
    equal(ask(7), first)
    holds(ask(8) != first, first)


@check
def chat_logprobs() -> None:
    answer = chat(max_tokens=6, logprobs=True, top_logprobs=3)
    content = answer.choices[0].logprobs.content
    equal(len(content), 6)
    equal("".join(entry.token for entry in content), answer.choices[0].message.content)
    for entry in content:
        equal(bytes(entry.bytes).decode(), entry.token)
        equal(len(entry.top_logprobs), 3)
        equal(entry.top_logprobs[0].token, entry.token)
        equal(entry.top_logprobs[0].logprob, entry.logprob)
        holds(all(a.logprob >= b.logprob for a, b in itertools.pairwise(entry.top_logprobs)), entry)
        holds(entry.logprob <= 0, entry)
    chunks = chat(max_tokens=6, logprobs=True, top_logprobs=3, stream=True)
    streamed = [entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    equal([entry.token for entry in streamed], [entry.token for entry in content])
    holds(all(abs(a.logprob - b.logprob) < 0.1 for a, b in zip(streamed, content, strict=True)), streamed)


@check
def max_completion_tokens_limits_chat() -> None:
    answer = chat(max_completion_tokens=3)
    equal(answer.usage.completion_tokens, 3)
    equal(answer.choices[0].finish_reason, "length")


@check
def errors_have_class_code_and_param() -> None:
    error = raises(BadRequestError, lambda: chat(temperature=3))
    equal((error.code, error.param, error.type), ("invalid_value", "temperature", "invalid_request_error"))
    holds(error.request_id, error)
    error = raises(NotFoundError, lambda: chat(model="no-such-model"))
    equal((error.code, error.param), ("model_not_found", "model"))
    error = raises(BadRequestError, lambda: complete(prompt="word " * 5000, max_tokens=1))
    equal(error.code, "context_length_exceeded")
    error = raises(BadRequestError, lambda: chat(n=0))
    equal(error.param, "n")
    error = raises(BadRequestError, lambda: chat(messages=[{"role": "wizard", "content": "x"}]))
    equal(error.param, "messages[0].role")
    error = raises(BadRequestError, lambda: chat(temperature=3, stream=True))
    equal(error.param, "temperature")


@check
def request_ids_come_back() -> None:
    holds(chat(max_tokens=1)._request_id)
    equal(chat(max_tokens=1, extra_headers={"X-Request-Id": "compat-1"})._request_id, "compat-1")


async def _leave_mid_stream() -> int:
    """Read three chunks of a long answer, drop the stream, and return how many chunks had come."""
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="unused", max_retries=0) as leaving:
        stream = await leaving.chat.completions.create(
            model=MODEL, messages=COUNT, stream=True, max_tokens=1500, extra_body={"ignore_eos": True}
        )
        num_chunks = 0
        async for _ in stream:
            num_chunks += 1
            if num_chunks == 3:
                break
        await stream.close()
    return num_chunks


async def _cancel_mid_answer() -> None:
    """Cancel the task that waits for a whole answer."""
    async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="unused", max_retries=0) as leaving:
        fields: dict[str, Any] = {"model": MODEL, "messages": COUNT, "max_tokens": 1500}
        try:
            await asyncio.wait_for(leaving.chat.completions.create(**fields, extra_body={"ignore_eos": True}), 0.5)
        except TimeoutError:
            return
    raise AssertionError("1,500 tokens came within half a second")


@check
def who_leaves_mid_stream_frees_the_request() -> None:
    num_aborts = count_aborts(URL)
    equal(asyncio.run(_leave_mid_stream()), 3)
    wait_until_idle(URL)
    equal(count_aborts(URL), num_aborts + 1)


@check
def who_leaves_before_the_answer_frees_the_request() -> None:
    num_aborts = count_aborts(URL)
    asyncio.run(_cancel_mid_answer())
    wait_until_idle(URL)
    equal(count_aborts(URL), num_aborts + 1)


@check
def concurrent_async_requests_all_answer() -> None:
    async def ask_all() -> list[Any]:
        async with AsyncOpenAI(base_url=f"{URL}/v1", api_key="unused", max_retries=0) as many:
            asks = [
                many.completions.create(model=MODEL, prompt=f"Number {i} is", max_tokens=4, temperature=0)
                for i in range(16)
            ]
            return await asyncio.gather(*asks)

    equal([answer.usage.completion_tokens for answer in asyncio.run(ask_all())], [4] * 16)


if __name__ == "__main__":
    run_checks()
