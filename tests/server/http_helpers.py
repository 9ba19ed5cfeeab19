"""An app around a FakeEngineClient, reached in process or through a real uvicorn on loopback."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI
from starlette.routing import Route

from server.access.setup import Access
from server.admission import Admission, SamplingDefaults
from server.app import AppSettings, create_app
from server.chat_template import ChatTemplateError
from server.lifecycle.drain import Drain
from server.logs.request_log import RequestLog
from server.overload.limits import Limits
from server.prompt_threads import PromptThreads
from server.prompts import PromptBuilder, Template
from server.streaming import StreamTiming
from tests.server.fake_engine_client import FakeEngineClient

MODEL = "org/fake-model"


class FakeTokenizer:
    """One token a character: its code point modulo the vocabulary; BOS (id 1) where special tokens are added."""

    vocab_size = 1000

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        text.encode()  # as a real one: a lone surrogate is an error
        return [1] * add_special_tokens + [ord(character) % self.vocab_size for character in text]

    def encode_with_offsets(self, text: str, add_special_tokens: bool) -> tuple[list[int], list[int]]:
        return self.encode(text, add_special_tokens), [0] * add_special_tokens + list(range(len(text)))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return "".join(map(self._show, token_ids))

    def decode_with_offsets(self, token_ids: Sequence[int]) -> tuple[str, list[int]]:
        shown = list(map(self._show, token_ids))
        return "".join(shown), [0, *itertools.accumulate(map(len, shown))][:-1]

    def token_bytes(self, token_id: int) -> bytes:
        return self._show(token_id).encode()

    def _show(self, token_id: int) -> str:
        return "<s>" if token_id == 1 else chr(token_id)


class FakeTemplate:
    """`role:content|` a message, then `assistant:`. Refuses two messages in a row of one role."""

    def render(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = True) -> str:
        roles = [message["role"] for message in messages]
        if any(first == second for first, second in itertools.pairwise(roles)):
            raise ChatTemplateError("Roles must alternate.")
        rendered = "".join(f"{message['role']}:{message['content']}|" for message in messages)
        return rendered + "assistant:" * add_generation_prompt


class FakeMetrics:
    def __init__(self) -> None:
        self.unknown: list[str] = []
        self.http: list[tuple[str, str, str]] = []
        self.refused: list[str] = []
        self.rejections: list[str] = []
        self.watched: list[Callable[[], Mapping[str, float]]] = []

    def count_unknown_field(self, name: str) -> None:
        self.unknown.append(name)

    def record_http(self, *, method: str, status: str, handler: str, duration_s: float) -> None:
        self.http.append((method, status, handler))

    def count_access_refusal(self, reason: str) -> None:
        self.refused.append(reason)

    def count_rejection(self, reason: str) -> None:
        self.rejections.append(reason)

    def watch(self, read: Callable[[], Mapping[str, float]]) -> None:
        self.watched.append(read)

    def render(self) -> tuple[bytes, str]:
        return b"up 1\n", "text/plain; version=0.0.4"

    def get_values(self, metrics: Iterable[Sequence[str]]) -> list[float]:
        return [0.0 for _ in metrics]


def create_prompts(**overrides: Any) -> PromptBuilder:
    parts: dict[str, Any] = {
        "tokenizer": FakeTokenizer(),
        "chat_template": FakeTemplate(),
        "vocab_size": FakeTokenizer.vocab_size,
        **overrides,
    }
    return PromptBuilder(**parts)


def create_admission(
    engine_client: FakeEngineClient, *, prompts: PromptBuilder | None = None, **overrides: Any
) -> Admission:
    parts: dict[str, Any] = {
        "prompts": prompts or create_prompts(),
        "threads": PromptThreads(),
        "served_model_name": MODEL,
        "sampling_defaults": SamplingDefaults(eos_token_ids=frozenset({2})),
        **overrides,
    }
    return Admission(engine_client=engine_client, **parts)


def build_app(
    engine_client: FakeEngineClient,
    *,
    metrics: FakeMetrics | None = None,
    is_strict: bool = False,
    timing: StreamTiming | None = None,
    template: Template | None = None,
    has_template: bool = True,
    sampling_defaults: SamplingDefaults | None = None,
    has_priorities: bool = False,
    has_forced_usage: bool = False,
    drain: Drain | None = None,
    access: Access | None = None,
    request_log: RequestLog | None = None,
    limits: Limits | None = None,
) -> FastAPI:
    prompts = create_prompts(chat_template=(template or FakeTemplate()) if has_template else None)
    admission = create_admission(
        engine_client,
        prompts=prompts,
        sampling_defaults=sampling_defaults or SamplingDefaults(),
        has_priorities=has_priorities,
    )
    return create_app(
        engine_client=engine_client,
        admission=admission,
        metrics=metrics or FakeMetrics(),
        settings=AppSettings(
            served_model_name=MODEL,
            version="1.2.3",
            system_fingerprint="fp_test",
            is_strict=is_strict,
            has_forced_usage=has_forced_usage,
            timing=timing or StreamTiming(),
            access=access or Access(),
            limits=limits or Limits(),
        ),
        drain=drain,
        request_log=request_log,
    )


def list_routes(app: FastAPI) -> list[Route]:
    """Every route of an app, those of its routers too, whether FastAPI copies them or keeps them where they are."""
    found: list[Route] = []
    for route in app.routes:
        inner = getattr(route, "original_router", None)
        found += [route] if inner is None else inner.routes  # type: ignore[list-item]
    return found


@asynccontextmanager
async def connect(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
    """A client that calls the app in this process."""
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            yield client


@asynccontextmanager
async def serve(app: FastAPI) -> AsyncIterator[str]:
    """A real uvicorn on a free loopback port; yields its base URL."""
    config = uvicorn.Config(app, host="127.0.0.1", port=0, log_config=None, ws="none", timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    # uvicorn sets this once its sockets listen; a test must not poll for it.
    has_started = asyncio.Event()
    start_up = server.startup

    async def startup(sockets: Any = None) -> None:
        await start_up(sockets)
        has_started.set()

    server.startup = startup  # type: ignore[method-assign]
    task = asyncio.create_task(server._serve())
    await has_started.wait()
    port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await task


async def get_events(response: httpx.Response) -> list[str]:
    """The data of each event of a finished stream, comments left out."""
    text = (await response.aread()).decode()
    assert text.endswith("\n\n")
    return [event.removeprefix("data: ") for event in text.split("\n\n")[:-1] if not event.startswith(":")]


async def get_chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """The chunks of a finished stream, which must end with [DONE]."""
    *events, last = await get_events(response)
    assert last == "[DONE]"
    return [json.loads(event) for event in events]
