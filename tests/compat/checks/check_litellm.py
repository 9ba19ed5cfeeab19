"""litellm against a running server: `check_litellm.py URL`."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import Any

# Otherwise the import tries to download a list of prices.
os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"

import litellm
from checking import check, equal, holds, model_name, raises, run_checks

URL = sys.argv[1]
MODEL = model_name(URL)
QUESTION: list[Any] = [{"role": "user", "content": "Count from one to one hundred."}]
PROVIDERS = ("hosted_vllm", "openai")
litellm.suppress_debug_info = True


def ask(provider: str, **fields: Any) -> Any:
    shared: dict[str, Any] = {"messages": QUESTION, "max_tokens": 12, "temperature": 0, "num_retries": 0}
    where = {"model": f"{provider}/{MODEL}", "api_base": f"{URL}/v1", "api_key": "unused"}
    return litellm.completion(**{**where, **shared, **fields})


@check
def completion_answers_with_usage() -> None:
    for provider in PROVIDERS:
        answer = ask(provider)
        holds(answer.choices[0].message.content, answer)
        equal(answer.choices[0].finish_reason, "length")
        equal(answer.usage.completion_tokens, 12)


@check
def stream_says_the_same_with_usage() -> None:
    for provider in PROVIDERS:
        chunks = list(ask(provider, stream=True, stream_options={"include_usage": True}))
        rebuilt = litellm.stream_chunk_builder(chunks, messages=QUESTION)
        equal(rebuilt.choices[0].message.content, ask(provider).choices[0].message.content)
        equal(rebuilt.usage.completion_tokens, 12)


@check
def acompletion_streams() -> None:
    async def collect() -> str:
        stream = await litellm.acompletion(
            model=f"hosted_vllm/{MODEL}",
            api_base=f"{URL}/v1",
            messages=QUESTION,
            max_tokens=12,
            temperature=0,
            stream=True,
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    equal(asyncio.run(collect()), ask("hosted_vllm").choices[0].message.content)


@check
def n_seed_stop_and_logprobs_pass_through() -> None:
    for provider in PROVIDERS:
        answer = ask(provider, n=2, temperature=1, seed=5)
        equal([choice.index for choice in answer.choices], [0, 1])
        text = ask(provider).choices[0].message.content
        equal(ask(provider, stop=[text[6:9]]).choices[0].message.content, text[: text.index(text[6:9])])
        content = ask(provider, logprobs=True, top_logprobs=2).choices[0].logprobs.content
        equal("".join(entry.token for entry in content), text)


@check
def text_completion_whole_and_streamed() -> None:
    def complete(**fields: Any) -> Any:
        return litellm.text_completion(
            model=f"text-completion-openai/{MODEL}",
            api_base=f"{URL}/v1",
            api_key="unused",
            max_tokens=8,
            temperature=0,
            **fields,
        )

    whole = complete(prompt="The capital of France is").choices[0].text
    holds(whole)
    chunks = complete(prompt="The capital of France is", stream=True)
    equal("".join(chunk.choices[0].text or "" for chunk in chunks), whole)
    equal(complete(prompt=["The capital of France is", "Once upon a time"]).choices[0].text, whole)


@check
def errors_have_their_classes() -> None:
    for provider in PROVIDERS:
        raises(litellm.BadRequestError, lambda provider=provider: ask(provider, temperature=3))
        raises(litellm.NotFoundError, lambda provider=provider: ask(f"{provider}/no-such-model"))
        long = [{"role": "user", "content": "word " * 5000}]
        # Goes by the words of the message, and fallbacks to models with a longer context go by it.
        raises(litellm.ContextWindowExceededError, lambda provider=provider, long=long: ask(provider, messages=long))


if __name__ == "__main__":
    run_checks()
