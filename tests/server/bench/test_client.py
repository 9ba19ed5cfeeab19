from __future__ import annotations

import asyncio
import errno
import socket
import struct

import pytest

from server.bench.client import BenchClient, fetch_model_name
from server.bench.results import RequestResult
from server.bench.target import BenchError, Target
from tests.server.bench.stub_server import END, HEAD, Answer, StubServer, event, obey, plain, say, token, usage


async def ask(answer: Answer, *, num_tokens: int = 3, **settings: float) -> RequestResult:
    async with StubServer(answer) as server:
        return await BenchClient(server.target, "m", **settings).complete(" some words", num_tokens)


async def test_an_answer_is_counted_and_timed() -> None:
    result = await ask(obey, num_tokens=5)
    assert result.error is None
    assert (result.num_output_tokens, result.num_prompt_tokens, result.has_usage) == (5, 2, True)
    assert len(result.token_times) == 5
    assert result.start_s < result.token_times[0] <= result.token_times[-1] <= result.end_s


async def test_what_is_asked_is_a_greedy_answer_of_full_length_streamed() -> None:
    async with StubServer() as server:
        await BenchClient(server.target, "m").complete(" some words", 3)
    (request,) = server.requests
    assert request.first_line == "POST /v1/completions HTTP/1.1"
    assert request.body == {
        "model": "m",
        "prompt": " some words",
        "max_tokens": 3,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def test_a_key_is_sent() -> None:
    async with StubServer() as server:
        target = Target(server.target.host, server.target.port, api_key="secret")
        await BenchClient(target, "m").complete("", 1)
    assert server.requests[0].headers["authorization"] == "Bearer secret"


async def test_time_runs_from_when_a_request_was_due() -> None:
    async with StubServer() as server:
        client = BenchClient(server.target, "m")
        result = await client.complete("", 1, client.clock() - 100.0)
    assert 100.0 < result.ttft_s < 130.0


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (
            say(plain("400 Bad Request", b'{"error": {"message": "No such model."}}')),
            "the server answered 400: No such model.",
        ),
        (say(plain("503 Service Unavailable", b"")), "the server answered 503"),
        (say(b"HTTP/1.1 500 Oops\r\n\r\n" + b"x" * 100_000), "the server answered 500: xxx"),
        (
            say(HEAD, token(), event({"error": {"message": "out of memory"}})),
            "the stream holds an error: out of memory",
        ),
        (say(HEAD, token(), token()), "the stream ended before its [DONE]"),
        (say(HEAD, token(), END), "the stream ended before its [DONE]"),
        (say(), "the server closed the connection without an answer"),
        (say(b"SSH-2.0\r\n\r\n"), "the answer does not begin like HTTP/1.1"),
        (say(HEAD, event("{")), "an event is no JSON object"),
    ],
)
async def test_a_failure_is_in_the_result(answer: Answer, complaint: str) -> None:
    result = await ask(answer)
    assert result.error is not None and result.error.startswith(complaint)
    assert result.end_s >= result.start_s


async def test_a_broken_connection_is_told() -> None:
    async def break_off(_: object, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + token())
        await writer.drain()
        # Lingering for 0 s: the kernel resets the connection instead of closing it.
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    result = await ask(break_off)
    assert result.error == "the server broke the connection off"


async def test_an_answer_that_does_not_end_is_given_up() -> None:
    async def hang(_: object, writer: asyncio.StreamWriter) -> None:
        writer.write(HEAD + token())
        await writer.drain()
        await gone.wait()

    gone = asyncio.Event()
    result = await ask(hang, timeout_s=0.05)
    gone.set()
    assert result.error == "the answer did not end within 0.05 s"


async def test_nobody_listening_is_told() -> None:
    async with StubServer() as server:
        target = server.target
    result = await BenchClient(target, "m").complete("", 1)
    assert result.error == f"nothing listens on 127.0.0.1 port {target.port}"


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (socket.gaierror(-2, "Name or service not known"), "the host h is unknown"),
        (OSError("Multiple exceptions: [Errno 111] ('::1', 1), [Errno 111] ('127.0.0.1', 1)"), "nothing listens on h"),
        (OSError(errno.EMFILE, "Too many open files"), "raise ulimit -n"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "No route to host"),
    ],
)
async def test_why_there_is_no_connection_is_told_plainly(
    error: OSError, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(*_: object) -> None:
        raise error

    monkeypatch.setattr(asyncio.get_running_loop(), "create_connection", refuse)
    result = await BenchClient(Target("h", 1), "m").complete("", 1)
    assert result.error is not None and told in result.error


async def test_the_first_model_is_taken() -> None:
    async with StubServer() as server:
        assert await fetch_model_name(server.target) == "stub"
    assert server.requests[0].first_line == "GET /v1/models HTTP/1.1"


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (
            say(plain("401 Unauthorized", b'{"error": {"message": "Who are you?"}}')),
            r"the server answered 401: Who are you\?",
        ),
        (say(plain("200 OK", b'{"data": []}')), "lists no model; name one with --model"),
        (say(plain("200 OK", b"<html>")), "lists no model"),
        (say(b"220 mail.test ESMTP\r\n\r\n"), "does not begin like HTTP/1.1"),
    ],
)
async def test_a_server_without_models_is_told(answer: Answer, complaint: str) -> None:
    async with StubServer(answer) as server:
        with pytest.raises(BenchError, match=complaint):
            await fetch_model_name(server.target)


async def test_a_server_that_is_not_there_is_told() -> None:
    async with StubServer() as server:
        target = server.target
    with pytest.raises(BenchError, match=f"nothing listens on 127.0.0.1 port {target.port}. Is the server running"):
        await fetch_model_name(target)


async def test_the_usage_of_a_server_is_believed_over_events() -> None:
    result = await ask(say(HEAD, token(), token(finish_reason="length"), usage(2, 7), event("[DONE]"), END))
    assert (result.num_output_tokens, len(result.token_times), result.error) == (7, 2, None)
