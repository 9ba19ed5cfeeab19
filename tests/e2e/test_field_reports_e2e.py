"""What others' servers got wrong (field reports), tried on a real server; tests/server/test_field_reports.py lists all.

Here: A1 D13 D15 D16 E5 E22 E23 F4 F6 F7 F9 F10.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.log_lines import read_request_lines
from tests.e2e.raw_http import build_request
from tests.e2e.server_process import ServerProcess
from tests.server.stream_join import join_chat, join_completion

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
CONTEXT, BLOCK = 192, 64
# More than a block of tokens, with characters of one to four bytes.
TEXT = "Zürich, 日本 and 😀 are three words of a long line that goes on. " * 3


@pytest.fixture(scope="module")
def server(embedded_model: Path) -> Iterator[ServerProcess]:
    with ServerProcess("--max-model-len", str(CONTEXT), "--num-kv-blocks", "48", "--max-num-seqs", "8") as process:
        yield process


def ask(server: ServerProcess, path: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    """A greedy answer."""
    reply = httpx.post(server.url + path, json={"temperature": 0, "max_tokens": 1, **fields}, timeout=60)
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    return answer


def ask_streamed(server: ServerProcess, path: str = COMPLETIONS, **fields: Any) -> dict[str, Any]:
    """The same as a stream, put together again."""
    body = {"temperature": 0, "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}, **fields}
    events = httpx.post(server.url + path, json=body, timeout=60).text.split("\n\n")
    *chunks, done = [event.removeprefix("data: ") for event in events if event.startswith("data: ")]
    assert done == "[DONE]"
    return (join_chat if path == CHAT else join_completion)([json.loads(chunk) for chunk in chunks])


def count_cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def strip(answer: dict[str, Any]) -> dict[str, Any]:
    """What two equal questions must agree on: all but the names of the answers and what the cache had."""
    usage = {name: count for name, count in answer["usage"].items() if name != "prompt_tokens_details"}
    return {**answer, "id": "", "created": 0, "usage": usage}


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a1_a_closed_connection_aborts_and_counts(server: ServerProcess, path: str, stream: bool) -> None:
    before = server.metric("vllm:request_success_total")
    what = {"prompt": "Count:"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "Count:"}]}
    body = {**what, "max_tokens": 150, "ignore_eos": True, "stream": stream}
    with socket.create_connection(("127.0.0.1", server.port)) as sock:
        sock.sendall(build_request(path, json.dumps(body).encode()))
        server.wait_until(lambda: server.metric("vllm:num_requests_running") == 1, 30)
    server.wait_until(lambda: server.metric("vllm:num_requests_running") == 0, 5)
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert server.metric("vllm:request_success_total") - before == 1
    last = read_request_lines(server)[-1]
    assert (last["finish_reason"], last["client_disconnected"]) == ("abort", True)


def test_d13_usage_is_the_same_streamed_and_whole(server: ServerProcess) -> None:
    completion = {"prompt": [TEXT, "Hello"], "n": 2, "max_tokens": 3, "echo": True}
    chat = {"messages": [{"role": "user", "content": TEXT}], "n": 2, "max_tokens": 3}
    for path, fields in ((COMPLETIONS, completion), (CHAT, chat)):
        assert strip(ask_streamed(server, path, **fields)) == strip(ask(server, path, **fields))


def test_d15_d16_offsets_point_at_their_tokens_streamed_and_whole(server: ServerProcess) -> None:
    fields: dict[str, Any] = {"prompt": TEXT[:60], "echo": True, "logprobs": 2, "max_tokens": 4}
    whole, streamed = ask(server, **fields), ask_streamed(server, **fields)
    assert strip(streamed) == strip(whole)
    text, logprobs = whole["choices"][0]["text"], whole["choices"][0]["logprobs"]
    told = list(zip(logprobs["tokens"], logprobs["text_offset"], strict=True))
    assert len(told) == whole["usage"]["total_tokens"]
    # A part of a character is told as its bytes, at the place of the character.
    whole_tokens = [(token, offset) for token, offset in told if not token.startswith("bytes:")]
    assert 0 < len(whole_tokens) < len(told)
    assert all(text[offset : offset + len(token)] == token for token, offset in whole_tokens)
    assert logprobs["text_offset"] == sorted(logprobs["text_offset"])


def test_e5_an_echo_of_no_tokens_is_the_prompt_with_its_logprobs(server: ServerProcess) -> None:
    none = ask(server, prompt=TEXT[:60], echo=True, logprobs=1, max_tokens=0)
    one = ask(server, prompt=TEXT[:60], echo=True, logprobs=1, max_tokens=1)
    (choice,), num_tokens = none["choices"], none["usage"]["prompt_tokens"]
    assert (choice["text"], none["usage"]["completion_tokens"]) == (TEXT[:60], 0)
    for name, column in choice["logprobs"].items():
        assert column == one["choices"][0]["logprobs"][name][:num_tokens] and len(column) == num_tokens


def test_e22_too_long_a_prompt_is_told_what_was_sent_what_was_asked_and_the_limit(server: ServerProcess) -> None:
    num_tokens = ask(server, prompt="word " * 100)["usage"]["prompt_tokens"]
    body = {"prompt": "word " * 300, "max_tokens": 77}
    error = httpx.post(server.url + COMPLETIONS, json=body).json()["error"]
    assert error["code"] == "context_length_exceeded"
    for number in (3 * num_tokens - 2, 77, CONTEXT):
        assert f" {number}" in error["message"]


def test_e23_an_answer_that_never_ends_ends_at_the_context(server: ServerProcess) -> None:
    answer = ask(server, CHAT, messages=[{"role": "user", "content": "word " * 145}], max_tokens=None, ignore_eos=True)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["total_tokens"] == CONTEXT and answer["usage"]["completion_tokens"] < 20


def test_f6_f7_logprobs_of_a_cached_prompt_are_all_there_and_those_of_a_fresh_one(server: ServerProcess) -> None:
    ask(server, prompt=TEXT)
    assert count_cached(ask(server, prompt=TEXT)) >= BLOCK
    fields: dict[str, Any] = {"prompt": TEXT, "echo": True, "logprobs": 1, "prompt_logprobs": 1}
    cached, fresh = ask(server, **fields), ask(server, **fields, cache_salt="fresh")
    assert strip(cached) == strip(fresh) and count_cached(cached) == 0
    first, *rest = cached["choices"][0]["logprobs"]["token_logprobs"]
    assert first is None and all(isinstance(logprob, float) for logprob in rest)
    assert None not in cached["choices"][0]["prompt_logprobs"][1:]


def test_f9_two_salts_share_nothing_and_none_shares_with_neither(server: ServerProcess) -> None:
    prompt = "f9 " + TEXT
    cached = [
        count_cached(ask(server, prompt=prompt, **fields))
        for fields in ({}, {}, {"cache_salt": "a"}, {"cache_salt": "a"}, {"cache_salt": "b"}, {"cache_salt": None})
    ]
    assert [count > 0 for count in cached] == [False, True, False, True, False, True]
    assert httpx.post(server.url + COMPLETIONS, json={"prompt": prompt, "cache_salt": ""}).status_code == 400


def test_f4_f10_a_salt_that_spells_a_block_of_tokens_finds_nothing(server: ServerProcess) -> None:
    block, rest = list(range(32, 32 + BLOCK)), list(range(300, 300 + BLOCK + 1))
    ask(server, prompt=block + rest)
    assert count_cached(ask(server, prompt=block + rest)) == 2 * BLOCK
    salt = struct.pack(f"<{BLOCK}i", *block).decode()
    assert count_cached(ask(server, prompt=rest, cache_salt=salt)) == 0
