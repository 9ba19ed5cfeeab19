"""Requests over raw connections, one each: the client shall cost little of the machine that it measures."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import json
import socket
import time
from collections.abc import Callable, Coroutine
from typing import TypeVar, cast

from server.bench.response_reader import EventReader, ResponseError, ResponseReader
from server.bench.results import AnswerTally, RequestResult, describe_refusal
from server.bench.target import BenchError, Target

_OK = 200
_MAX_REFUSAL_BYTES = 16_384
_MODELS_WAIT_S = 30.0
Clock = Callable[[], float]
T = TypeVar("T")


class _Exchange(asyncio.Protocol):
    """One request and its answer; ``ended`` is set when there is nothing more to wait for.

    Args:
        request: Is sent as it is.
        on_body: Gets the status and each piece of the body; True = that was all that is wanted.
    """

    def __init__(self, request: bytes, on_body: Callable[[int, bytes], bool]) -> None:
        self.reader = ResponseReader()
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._on_body = on_body

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's are none by class.
        cast(asyncio.WriteTransport, transport).write(self._request)

    def data_received(self, data: bytes) -> None:
        if self.ended.done():
            return
        try:
            body = self.reader.feed(data)
        except ResponseError as error:
            self.ended.set_exception(error)
            return
        if self._on_body(self.reader.status, body) or self.reader.is_complete:
            self.ended.set_result(None)

    def connection_lost(self, error: Exception | None) -> None:
        if self.ended.done():
            return
        if error is not None:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)


class _Answer:
    """A completion's body as it comes: events where the server agrees, its reason where it does not."""

    def __init__(self, result: RequestResult, clock: Clock) -> None:
        self.refusal = b""
        self.tally = AnswerTally(result)
        self._events = EventReader()
        self._clock = clock

    def take(self, status: int, body: bytes) -> bool:
        """Take a piece of the body; True = that was all that is wanted."""
        if status not in (0, _OK):
            self.refusal += body
            return len(self.refusal) > _MAX_REFUSAL_BYTES
        now_s = self._clock()
        for data in self._events.feed(body):
            self.tally.take(data, now_s)
        return self.tally.is_done


class BenchClient:
    """Sends requests and times their answers.

    Args:
        target: Whom to.
        model: As the server calls it.
        timeout_s: A request that takes longer has failed; 0 = no limit.
        clock: Seconds.
    """

    def __init__(
        self, target: Target, model: str, *, timeout_s: float = 600.0, clock: Clock = time.perf_counter
    ) -> None:
        self.clock = clock
        self._target = target
        self._model = model
        self._timeout_s = timeout_s

    async def complete(self, prompt: str, max_tokens: int, start_s: float | None = None) -> RequestResult:
        """Stream one completion of exactly ``max_tokens`` tokens, greedily; a failure is in the result.

        Args:
            prompt: Text.
            max_tokens: The model's own end does not end it.
            start_s: When the request was due; None = now.
        """
        request = self._target.build_post("/v1/completions", self._build_body(prompt, max_tokens))
        result = RequestResult(start_s=self.clock() if start_s is None else start_s)
        answer = _Answer(result, self.clock)
        try:
            async with asyncio.timeout(self._timeout_s or None):
                status = await _exchange(self._target, request, answer.take)
            result.error = result.error or _find_fault(answer, status)
        except TimeoutError:
            result.error = f"the answer did not end within {self._timeout_s:g} s"
        except (OSError, ResponseError) as error:
            result.error = _describe(error, self._target)
        result.end_s = self.clock()
        return result

    def _build_body(self, prompt: str, max_tokens: int) -> dict[str, object]:
        return {
            "model": self._model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }


def run_in_loop(work: Coroutine[None, None, T]) -> T:
    """Run a coroutine to its end, in uvloop where there is one: an event then costs the client a third less."""
    factory = None
    if importlib.util.find_spec("uvloop"):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner:
        return runner.run(work)


async def fetch_model_name(target: Target) -> str:
    """Return the name of the first model that the server lists.

    Raises:
        BenchError: It cannot be reached, or lists none.
    """
    body = bytearray()

    def keep(_: int, piece: bytes) -> bool:
        body.extend(piece)
        return False

    try:
        async with asyncio.timeout(_MODELS_WAIT_S):
            status = await _exchange(target, target.build_get("/v1/models"), keep)
    except TimeoutError:
        raise BenchError(f"{target.url} does not answer /v1/models; is it a server of OpenAI's API?") from None
    except (OSError, ResponseError) as error:
        raise BenchError(f"At {target.url}: {_describe(error, target)}. Is the server running?") from None
    if status != _OK:
        refusal = describe_refusal(status, bytes(body[:_MAX_REFUSAL_BYTES]))
        raise BenchError(f"{target.url}/v1/models does not list models ({refusal}); check the URL, or name a --model.")
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError):
        raise BenchError(f"{target.url}/v1/models lists no model; name one with --model.") from None


async def _exchange(target: Target, request: bytes, on_body: Callable[[int, bytes], bool]) -> int:
    """Send a request, wait for the answer's end and return its status, 0 where there was none.

    The connection is closed whatever happens: a server aborts what nobody reads.
    """
    loop = asyncio.get_running_loop()
    transport, exchange = await loop.create_connection(lambda: _Exchange(request, on_body), target.host, target.port)
    try:
        await exchange.ended
    finally:
        transport.abort()
    return exchange.reader.status


def _find_fault(answer: _Answer, status: int) -> str | None:
    if status == 0:
        return "the server closed the connection without an answer"
    if status != _OK:
        return describe_refusal(status, answer.refusal)
    if not answer.tally.is_done:
        return "the stream ended before its [DONE]"
    return None


def _describe(error: Exception, target: Target) -> str:
    if isinstance(error, socket.gaierror):
        return f"the host {target.host} is unknown"
    # A name with several addresses: each refused, with a text of its own.
    if isinstance(error, ConnectionRefusedError) or str(error).startswith("Multiple exceptions"):
        return f"nothing listens on {target.host} port {target.port}"
    if isinstance(error, ConnectionError):
        return "the server broke the connection off"
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        return "this process may open no more connections: lower the load, or raise ulimit -n"
    return str(error)
