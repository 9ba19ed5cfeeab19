"""langchain-openai against a running server: `check_langchain_openai.py URL`."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import openai
from checking import check, count_aborts, equal, holds, model_name, raises, run_checks, wait_until_idle
from langchain_core.exceptions import ContextOverflowError
from langchain_core.messages import HumanMessage
from langchain_openai import ChatOpenAI, OpenAI

URL = sys.argv[1]
MODEL = model_name(URL)
QUESTION = "Count from one to one hundred."
FIELDS: dict[str, Any] = {"model": MODEL, "base_url": f"{URL}/v1", "api_key": "unused", "max_retries": 0}
chat = ChatOpenAI(**FIELDS, temperature=0, max_tokens=12, stream_usage=True)
text_model = OpenAI(**FIELDS, temperature=0, max_tokens=8)


@check
def invoke_answers_with_usage() -> None:
    answer = chat.invoke([("system", "You count."), ("human", QUESTION)])
    holds(answer.content, answer)
    equal(answer.usage_metadata["output_tokens"], 12)
    equal(answer.response_metadata["finish_reason"], "length")
    equal(answer.response_metadata["model_name"], MODEL)
    holds(answer.id, answer)


@check
def stream_says_the_same_with_usage() -> None:
    whole = chat.invoke(QUESTION)
    chunks = list(chat.stream(QUESTION))
    summed = chunks[0]
    for chunk in chunks[1:]:
        summed += chunk
    equal(summed.content, whole.content)
    equal(summed.usage_metadata["output_tokens"], 12)
    equal(summed.usage_metadata["input_tokens"], whole.usage_metadata["input_tokens"])
    holds(len(chunks) > 3, chunks)


@check
def batch_answers_in_order() -> None:
    questions = [QUESTION, "What is the capital of France?", "Name a river."]
    equal([a.content for a in chat.batch(questions)], [chat.invoke(question).content for question in questions])


@check
def conversation_goes_on() -> None:
    first = chat.invoke(QUESTION)
    holds(chat.invoke([("human", QUESTION), first, ("human", "Go on.")]).content)


@check
def bound_stop_and_seed() -> None:
    text = chat.invoke(QUESTION).content
    stop = text[6:9]
    equal(chat.bind(stop=[stop]).invoke(QUESTION).content, text[: text.index(stop)])
    warm = ChatOpenAI(**FIELDS, temperature=1, seed=4, max_tokens=8)
    equal(warm.invoke(QUESTION).content, warm.invoke(QUESTION).content)


@check
def logprobs_reach_the_metadata() -> None:
    answer = chat.bind(logprobs=True, top_logprobs=2).invoke(QUESTION)
    content = answer.response_metadata["logprobs"]["content"]
    equal("".join(entry["token"] for entry in content), answer.content)


@check
def n_generations() -> None:
    warm = ChatOpenAI(**FIELDS, temperature=1, seed=5, n=2, max_tokens=8)
    equal(len(warm.generate([[HumanMessage(QUESTION)]]).generations[0]), 2)


@check
def completions_class_invokes_streams_and_batches() -> None:
    whole = text_model.invoke("The capital of France is")
    holds(whole)
    equal("".join(text_model.stream("The capital of France is")), whole)
    equal(text_model.batch(["The capital of France is", "Once upon a time"])[0], whole)
    # generate() sends all prompts in one request.
    result = text_model.generate(["The capital of France is", "Once upon a time"])
    equal(result.generations[0][0].text, whole)
    equal(result.llm_output["token_usage"]["completion_tokens"], 16)


@check
def errors_have_their_classes() -> None:
    error = raises(openai.BadRequestError, lambda: chat.bind(temperature=3).invoke(QUESTION))
    equal(error.param, "temperature")
    raises(openai.NotFoundError, lambda: chat.bind(model="no-such-model").invoke(QUESTION))
    # What agents catch to shorten a conversation and ask again. It goes by the words of the message.
    raises(ContextOverflowError, lambda: chat.invoke("word " * 5000))


@check
def who_leaves_mid_stream_frees_the_request() -> None:
    long = ChatOpenAI(**FIELDS, max_tokens=1500, extra_body={"ignore_eos": True})

    async def leave() -> None:
        stream = long.astream(QUESTION)
        await anext(stream)
        await stream.aclose()

    num_aborts = count_aborts(URL)
    asyncio.run(leave())
    wait_until_idle(URL)
    equal(count_aborts(URL), num_aborts + 1)


if __name__ == "__main__":
    run_checks()
