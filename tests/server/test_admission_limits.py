from __future__ import annotations

from typing import Any

import pytest

from server.admission_limits import MAX_OUTPUT_LOGPROBS, MAX_PROMPT_LOGPROBS, check_num_logprobs
from server.errors import ErrorKind, RequestError
from server.generation import Prompt
from server.protocol import parse_completion
from server.wire_types import CompletionRequest


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion({"prompt": "a", **fields}, is_strict=True, on_unknown=print)


def test_the_logprobs_of_prompts_are_bounded() -> None:
    wire = completion(prompt_logprobs=9)
    fits, too_long = Prompt([5] * (MAX_PROMPT_LOGPROBS // 10)), Prompt([5] * (MAX_PROMPT_LOGPROBS // 10 + 1))
    check_num_logprobs(wire, [fits], 16, 10**6)
    with pytest.raises(RequestError, match=f"{MAX_PROMPT_LOGPROBS} are the most") as caught:
        check_num_logprobs(wire, [too_long], 16, 10**6)
    assert (caught.value.kind, caught.value.param) == (ErrorKind.INVALID_VALUE, "prompt_logprobs")
    with pytest.raises(RequestError) as caught:
        check_num_logprobs(completion(echo=True, logprobs=9), [fits, Prompt([5])], 16, 10**6)
    assert caught.value.param == "logprobs"


def test_the_logprobs_of_whole_answers_are_bounded_by_what_they_may_become() -> None:
    prompt = Prompt([5] * 10)
    max_tokens = MAX_OUTPUT_LOGPROBS // 4
    check_num_logprobs(completion(logprobs=1, n=2), [prompt], max_tokens, 10**9)
    with pytest.raises(RequestError, match="unless they are streamed") as caught:
        check_num_logprobs(completion(logprobs=1, n=2), [prompt], max_tokens + 1, 10**9)
    assert caught.value.param == "logprobs"
    check_num_logprobs(completion(logprobs=1, n=2, stream=True), [prompt], max_tokens + 1, 10**9)
    # The context bounds an answer too.
    check_num_logprobs(completion(logprobs=1, n=2), [prompt], 10**12, max_tokens)
    check_num_logprobs(completion(n=2), [prompt], 10**12, 10**12)
