"""Fuzz target of requests: any body becomes a request that the engine may be asked, or a refusal in a sentence."""

from __future__ import annotations

import asyncio
import functools
import json
import time
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx
from fastapi import FastAPI
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.types import Message

from server.admission import Admission, Admitted
from server.errors import RequestError
from server.json_text import JSONTextError, decode_json, scrub_surrogates
from server.protocol import parse_chat, parse_completion, parse_detokenize, parse_tokenize
from server.request_reader import RequestReader
from server.wire_types import ChatRequest, CompletionRequest, Wire
from tests.long.fuzz_bodies import VALID_BODIES, bodies
from tests.long.fuzz_oracles import check_refusal, check_sampling, parse_events
from tests.server.fake_engine_client import FakeEngineClient, create_state
from tests.server.http_helpers import FakeMetrics, FakeTokenizer, build_app, create_admission

MAX_PARSE_S = 0.5
PARSERS: dict[str, Any] = {
    "/v1/completions": parse_completion,
    "/v1/completions/render": parse_completion,
    "/v1/chat/completions": parse_chat,
    "/v1/chat/completions/render": parse_chat,
    "/tokenize": parse_tokenize,
    "/detokenize": parse_detokenize,
}
T = TypeVar("T")


@dataclass(frozen=True)
class RequestCase:
    """A body, where it is sent, and how the server was started."""

    path: str
    body: bytes
    is_strict: bool = False
    has_priorities: bool = False
    has_template: bool = True


_MOSTLY = st.sampled_from([True, True, True, False])
request_cases = st.sampled_from(list(VALID_BODIES)).flatmap(
    lambda path: st.builds(RequestCase, st.just(path), bodies(path), st.booleans(), st.booleans(), _MOSTLY)
)


def check_request(case: RequestCase) -> None:
    """Check one case at each stage: parsing, admission, and the whole application."""
    check_decoding(case.body)
    with asyncio.Runner() as runner:
        wire = runner.run(_check_parsing(case))
        if isinstance(wire, CompletionRequest | ChatRequest):
            runner.run(_check_admission(case, wire))
        runner.run(_check_app(case))


def check_decoding(body: bytes) -> None:
    """Check decode_json against the standard library, which takes the same texts and gives the same values.

    Ours alone refuses deep nesting and whole numbers of thousands of digits.
    """
    try:
        expected = _scrub(json.loads(body.decode(errors="surrogatepass"), parse_constant=_refuse))
    except (ValueError, RecursionError):
        expected = None
    try:
        value = decode_json(body)
    except JSONTextError as error:
        assert expected is None or "recursion limit" in str(error) or "out of range" in str(error), error
    else:
        assert value == expected
        assert repr(value) == repr(expected)  # 1, 1.0 and true are equal


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _scrub(value: Any) -> Any:
    if isinstance(value, list):
        return list(map(_scrub, value))
    if isinstance(value, dict):
        return {scrub_surrogates(name): _scrub(item) for name, item in value.items()}
    return scrub_surrogates(value) if isinstance(value, str) else value


async def _check_parsing(case: RequestCase) -> Wire | None:
    reader = RequestReader(metrics=FakeMetrics(), is_strict=case.is_strict)
    started = time.thread_time()
    wire = await _allow_refusal(reader.read(_build_request(case.body), PARSERS[case.path]), case)
    # A long body is parsed on another thread, so this counts what holds the loop; then the same here.
    _decode(case.body)
    assert time.thread_time() - started < MAX_PARSE_S
    return wire


async def _check_admission(case: RequestCase, wire: CompletionRequest | ChatRequest) -> None:
    admission = _get_admission(case.has_priorities)
    admit: Any = admission.admit_completion if isinstance(wire, CompletionRequest) else admission.admit_chat
    admitted = await _allow_refusal(admit(wire), case)
    if admitted is not None:
        check_admitted(admitted, wire, max_len=create_state().max_model_len)


# Building an app takes longer than all that is asked of it.
@functools.cache
def _get_admission(has_priorities: bool) -> Admission:
    return create_admission(FakeEngineClient(), has_priorities=has_priorities)


@functools.cache
def _get_app(**settings: bool) -> tuple[FakeEngineClient, FastAPI]:
    client = FakeEngineClient()
    return client, build_app(client, **settings)


def check_admitted(admitted: Admitted, wire: CompletionRequest | ChatRequest, *, max_len: int) -> None:
    """Check that the engine may be asked each of these requests."""
    num_prompts = len(wire.prompt) if isinstance(wire, CompletionRequest) else 1
    assert len(admitted.requests) == num_prompts * (wire.n or 1)
    requests = [request.engine_request for request in admitted.requests]
    assert len({request.request_id for request in requests}) == len(requests)
    for request in requests:
        ids = request.prompt_token_ids
        assert 1 <= len(ids) < max_len
        assert all(type(token_id) is int and 0 <= token_id < FakeTokenizer.vocab_size for token_id in ids)
        assert -(2**31) <= request.priority < 2**31
        request.cache_salt.encode()
        check_sampling(request.sampling_params, room=max_len - len(ids), vocab_size=FakeTokenizer.vocab_size)


async def _check_app(case: RequestCase) -> None:
    client, app = _get_app(is_strict=case.is_strict, has_priorities=case.has_priorities, has_template=case.has_template)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://server") as http:
        response = await http.post(case.path, content=case.body, headers={"Content-Type": "application/json"})
    check_response(response)
    assert client.num_live == 0
    assert client.aborted == []
    client.requests.clear()


def check_response(response: httpx.Response) -> None:
    """Check that a response is a whole answer, a whole stream, or an error in OpenAI's form."""
    assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
    if response.headers["content-type"].startswith("text/event-stream"):
        *events, last = parse_events(response.content)
        assert last == "[DONE]"
        assert all("error" not in json.loads(event) for event in events)
        return
    value = json.loads(response.content)
    if response.status_code != 200:
        assert set(value["error"]) == {"message", "type", "param", "code"}


async def _allow_refusal(work: Coroutine[Any, Any, T], case: RequestCase) -> T | None:
    try:
        return await work
    except RequestError as error:
        check_refusal(error, _decode(case.body))
        return None


def _decode(body: bytes) -> Any:
    try:
        return decode_json(body)
    except JSONTextError:
        return None


def _build_request(body: bytes) -> Request:
    async def receive() -> Message:
        return {"type": "http.request", "body": body, "more_body": False}

    headers = [(b"content-type", b"application/json")]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": headers}, receive)
