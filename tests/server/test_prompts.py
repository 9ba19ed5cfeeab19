from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Mapping, Sequence

import pytest

from server.errors import RequestError
from server.prompt_threads import PromptThreads
from server.prompts import MAX_INLINE_CHARS, count_chars, show_number
from server.protocol import parse_chat
from server.wire_types import ChatMessage
from tests.server.http_helpers import create_prompts


def messages(*sent: dict[str, str]) -> list[ChatMessage]:
    return parse_chat({"messages": list(sent)}, is_strict=True, on_unknown=print).messages


def test_a_text_prompt_keeps_only_what_is_wanted() -> None:
    prompts = create_prompts()
    assert prompts.build_from_text("ab").text is None
    assert prompts.build_from_text("ab", has_text=True).text == "ab"
    assert list(prompts.build_from_text("ab", has_offsets=True, add_special_tokens=False).offsets) == [0, 1]


def test_ids_become_text_only_where_it_is_wanted() -> None:
    prompts = create_prompts()
    assert prompts.build_from_ids([97]).text is None
    assert prompts.build_from_ids([1, 97], has_text=True).text == "<s>a"
    assert list(prompts.build_from_ids([1, 97], has_offsets=True).offsets) == [0, 3]


def test_all_text_of_a_conversation_is_counted() -> None:
    sent = {"role": "assistant", "content": "ab", "reasoning_content": "x" * 100, "name": "Bo"}
    assert count_chars(messages(sent)) >= 104
    assert count_chars(messages({"role": "assistant", "content": "ab", "reasoning": "x" * 100})) >= 102


def test_a_missing_template_is_the_requests_error() -> None:
    with pytest.raises(RequestError, match="no chat template"):
        create_prompts(chat_template=None).build_from_messages(messages({"role": "user", "content": "a"}))


async def test_text_work_runs_beside_the_loop_and_its_errors_come_back() -> None:
    threads = PromptThreads()

    def fail() -> None:
        raise ValueError(threading.current_thread().name)

    for num_chars in (1, 10**6):
        assert await threads.run(num_chars, threading.current_thread) is not threading.main_thread()
        with pytest.raises(ValueError, match="prompts"):
            await threads.run(num_chars, fail)
    threads.close()
    with pytest.raises(RuntimeError):
        await asyncio.wait_for(threads.run(1, fail), 10)


def test_an_absurd_number_is_shown_by_its_beginning() -> None:
    assert show_number(-5) == "-5"
    assert show_number(10**1000) == "1" + "0" * 39 + "…"


class BusyTemplate:
    """Takes 30 ms of CPU time."""

    def render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True) -> str:
        end = time.thread_time() + 0.03
        while time.thread_time() < end:
            pass
        return "ab"


def test_only_a_short_conversation_shows_that_a_template_is_slow() -> None:
    prompts = create_prompts(chat_template=BusyTemplate())
    prompts.build_from_messages(messages({"role": "user", "content": "x" * MAX_INLINE_CHARS}))
    assert not prompts.has_slow_template
    prompts.build_from_messages(messages({"role": "user", "content": "x"}))
    assert prompts.has_slow_template
