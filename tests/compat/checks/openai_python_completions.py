"""openai-python's checks of completions; importing this registers them."""

from __future__ import annotations

from typing import Any

from checking import check, equal, holds
from openai_python_asks import PROMPT, complete, tokenize


@check
def stop_ends_a_text_and_is_not_in_it() -> None:
    text = complete(max_tokens=16).choices[0].text
    stop = text[6:9]
    for stops in (stop, ["never seen", stop]):
        choice = complete(max_tokens=16, stop=stops).choices[0]
        equal(choice.text, text[: text.index(stop)])
        equal(choice.finish_reason, "stop")
    streamed = complete(max_tokens=16, stop=stop, stream=True)
    equal("".join(chunk.choices[0].text for chunk in streamed), text[: text.index(stop)])


@check
def penalties_and_logit_bias_change_what_comes() -> None:
    first = complete(max_tokens=1).choices[0].text
    token = tokenize(first)[0]
    holds(complete(max_tokens=1, logit_bias={str(token): -100}).choices[0].text != first)
    equal(complete(max_tokens=3, logit_bias={str(token): 100}).choices[0].text, first * 3)
    fields: dict[str, Any] = {"prompt": "na na na na na na na na na", "max_tokens": 24}
    penalised = complete(**fields, presence_penalty=2, frequency_penalty=2).choices[0].text
    holds(penalised != complete(**fields).choices[0].text, penalised)


@check
def completions_take_every_form_of_prompt() -> None:
    other = "Once upon a time"
    texts = [complete(prompt=prompt, max_tokens=8).choices[0].text for prompt in (PROMPT, other)]
    ids = [tokenize(prompt) for prompt in (PROMPT, other)]
    for prompts in ([PROMPT, other], ids):
        answer = complete(prompt=prompts, max_tokens=8)
        equal([choice.index for choice in answer.choices], [0, 1])
        equal([choice.text for choice in answer.choices], texts)
        equal(answer.usage.prompt_tokens, sum(map(len, ids)))
    equal(complete(prompt=ids[0], max_tokens=8).choices[0].text, texts[0])


@check
def completions_order_n_choices_by_prompt() -> None:
    answer = complete(prompt=[PROMPT, "Once upon a time"], n=2, temperature=1, seed=3, max_tokens=4)
    equal([choice.index for choice in answer.choices], [0, 1, 2, 3])
    equal(answer.usage.completion_tokens, 16)


@check
def completions_stream_says_the_same() -> None:
    whole = complete(max_tokens=12)
    *chunks, last = complete(max_tokens=12, stream=True, stream_options={"include_usage": True})
    equal("".join(chunk.choices[0].text for chunk in chunks), whole.choices[0].text)
    equal([c.choices[0].finish_reason for c in chunks if c.choices[0].finish_reason], ["length"])
    equal(last.choices, [])
    equal(last.usage.completion_tokens, 12)


def check_offsets(logprobs: Any, text: str) -> None:
    pieces = zip(logprobs.tokens, logprobs.text_offset, strict=True)
    holds(all(text[offset : offset + len(token)] == token for token, offset in pieces), logprobs)


@check
def echo_with_logprobs_scores_a_prompt() -> None:
    answer = complete(echo=True, logprobs=2, max_tokens=0)
    choice = answer.choices[0]
    equal(choice.text, PROMPT)
    equal(answer.usage.completion_tokens, 0)
    equal("".join(choice.logprobs.tokens), PROMPT)
    equal(len(choice.logprobs.tokens), answer.usage.prompt_tokens)
    check_offsets(choice.logprobs, PROMPT)
    holds(choice.logprobs.token_logprobs[0] is None, choice.logprobs)
    holds(all(value <= 0 for value in choice.logprobs.token_logprobs[1:]), choice.logprobs)
    holds(choice.logprobs.top_logprobs[0] is None, choice.logprobs)
    holds(all(2 <= len(top) <= 3 for top in choice.logprobs.top_logprobs[1:]), choice.logprobs)


@check
def echo_goes_before_the_answer() -> None:
    text = complete(max_tokens=6).choices[0].text
    answer = complete(max_tokens=6, echo=True, logprobs=1)
    equal(answer.choices[0].text, PROMPT + text)
    check_offsets(answer.choices[0].logprobs, PROMPT + text)
    equal(len(answer.choices[0].logprobs.tokens), answer.usage.total_tokens)
    streamed = complete(max_tokens=6, echo=True, stream=True)
    equal("".join(chunk.choices[0].text for chunk in streamed), PROMPT + text)


@check
def completions_logprobs_of_the_answer_alone() -> None:
    choice = complete(max_tokens=5, logprobs=0).choices[0]
    equal("".join(choice.logprobs.tokens), choice.text)
    check_offsets(choice.logprobs, choice.text)
    holds(all(value is not None and value <= 0 for value in choice.logprobs.token_logprobs), choice.logprobs)
