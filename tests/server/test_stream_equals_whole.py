"""A stream says what the whole answer says, whatever was asked for and however the engine's steps fell."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_core import EngineCoreOutput, EngineCoreRequest, FinishReason, TokenLogprobs
from server.app import AppSettings, create_app
from server.in_proc_client import InProcEngineClient
from server.metrics import ServerMetrics
from server.output_processor import OutputProcessor
from tests.server.fake_engine import CharDecodeStream, FakeEngine, HoldingDecodeStream, char_bytes
from tests.server.fake_engine_client import FakeEngineClient
from tests.server.http_helpers import MODEL, FakeMetrics, connect, create_admission
from tests.server.stream_join import join_chat, join_completion

DECODERS = (CharDecodeStream, HoldingDecodeStream)


@dataclass(frozen=True)
class Plan:
    """What the engine says for a request: a text, cut into steps, and how it ends."""

    text: str
    cuts: tuple[int, ...]
    finish_reason: FinishReason

    def pieces(self) -> list[str]:
        bounds = [0, *sorted({cut for cut in self.cuts if 0 < cut < len(self.text)}), len(self.text)]
        return [self.text[start:stop] for start, stop in itertools.pairwise(bounds)]


class PlannedEngine(FakeEngine):
    """Answers each request by the plan of its index; some steps fall together with the reader's, some do not."""

    plans: Sequence[Plan]
    tasks: list[asyncio.Task[None]]

    def add_request(self, request: EngineCoreRequest) -> None:
        super().add_request(request)
        self.tasks.append(asyncio.get_running_loop().create_task(self._follow(request)))

    async def _follow(self, request: EngineCoreRequest) -> None:
        index = int(request.request_id.rpartition("-")[2]) if "-" in request.request_id[9:] else 0
        pieces = self.plans[index].pieces()
        for number, piece in enumerate(pieces):
            self.step(self._build(request, piece, index, is_first=number == 0, is_last=number == len(pieces) - 1))
            if number % 3 != 2:
                await asyncio.sleep(0)

    def _build(
        self, request: EngineCoreRequest, piece: str, index: int, *, is_first: bool, is_last: bool
    ) -> EngineCoreOutput:
        params, ids = request.sampling_params, list(map(ord, piece))
        has_prompt = is_first and params.num_prompt_logprobs is not None
        return EngineCoreOutput(
            request.request_id,
            ids,
            self.plans[index].finish_reason if is_last else None,
            num_cached_tokens=1,
            logprobs=None if params.num_logprobs is None else list(map(describe, ids)),
            prompt_logprobs=list(map(describe, request.prompt_token_ids[1:])) if has_prompt else None,
        )


def describe(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(token_id, -token_id / 100, 2, (token_id + 1, token_id), (-0.25, -token_id / 100))


async def ask(plans: Sequence[Plan], path: str, body: dict[str, Any], decoder: type[CharDecodeStream]) -> Any:
    """The whole answer and the joined stream, of two equal runs."""
    processor = OutputProcessor(new_decode_stream=decoder, token_bytes=char_bytes, metrics=ServerMetrics("tiny"))
    engines: list[PlannedEngine] = []

    def create_engine(*args: Any) -> PlannedEngine:
        engines.append(PlannedEngine(*args))
        engines[0].plans, engines[0].tasks = plans, []
        return engines[0]

    client = InProcEngineClient(create_engine, processor)
    client.start()
    settings = AppSettings(served_model_name=MODEL, version="1", system_fingerprint="fp")
    admission = create_admission(FakeEngineClient())
    app = create_app(engine_client=client, admission=admission, metrics=FakeMetrics(), settings=settings)
    async with connect(app) as http:
        whole = await http.post(path, json=body)
        streamed = await http.post(path, json={**body, "stream": True, "stream_options": {"include_usage": True}})
    for task in engines[0].tasks:
        await task
    assert (whole.status_code, streamed.status_code) == (200, 200)
    assert processor.num_live == 0
    *events, done, end = streamed.text.split("\n\n")
    assert (done, end) == ("data: [DONE]", "")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    join = join_chat if "chat" in path else join_completion
    return whole.json(), join(chunks)


TEXTS = st.text("ab<>é\U0001f600", min_size=1, max_size=24)
PLANS = st.builds(
    Plan,
    text=TEXTS,
    cuts=st.lists(st.integers(1, 24), max_size=12).map(tuple),
    finish_reason=st.sampled_from([FinishReason.STOP, FinishReason.LENGTH]),
)
SHARED = {
    "stop": st.lists(st.text("ab<>", min_size=1, max_size=4), max_size=3),
    "include_stop_str_in_output": st.booleans(),
    "min_tokens": st.integers(0, 6),
}


def check_same(whole: dict[str, Any], streamed: dict[str, Any]) -> None:
    for reply in (whole, streamed):
        for varying in ("id", "created"):
            reply.pop(varying)
    assert streamed == whole


@settings(max_examples=50)
@given(
    data=st.data(),
    fields=st.fixed_dictionaries(
        {}, optional={**SHARED, "echo": st.booleans(), "logprobs": st.integers(0, 3), "max_tokens": st.integers(8, 20)}
    ),
    prompts=st.lists(st.text("ab<>é", min_size=1, max_size=24), min_size=1, max_size=2),
    n=st.integers(1, 3),
    decoder=st.sampled_from(DECODERS),
)
async def test_completions(
    data: st.DataObject, fields: dict[str, Any], prompts: list[str], n: int, decoder: type[CharDecodeStream]
) -> None:
    plans = data.draw(st.lists(PLANS, min_size=n * len(prompts), max_size=n * len(prompts)))
    whole, streamed = await ask(plans, "/v1/completions", {"prompt": prompts, "n": n, **fields}, decoder)
    if decoder is CharDecodeStream:
        check_offsets(whole)
    check_same(whole, streamed)
    assert whole["usage"]["prompt_tokens"] == sum(len(prompt) + 1 for prompt in prompts)


def check_offsets(whole: dict[str, Any]) -> None:
    """Where a choice has logprobs, its tokens' texts stand at their offsets."""
    for choice in whole["choices"]:
        logprobs = choice["logprobs"]
        if logprobs is None:
            continue
        for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
            assert token == "<s>" or choice["text"][offset : offset + 1] == token


@settings(max_examples=50)
@given(
    data=st.data(),
    fields=st.fixed_dictionaries({}, optional={**SHARED, "logprobs": st.just(True)}),
    n=st.integers(1, 3),
    decoder=st.sampled_from(DECODERS),
)
async def test_chat(data: st.DataObject, fields: dict[str, Any], n: int, decoder: type[CharDecodeStream]) -> None:
    plans = data.draw(st.lists(PLANS, min_size=n, max_size=n))
    messages = [{"role": "user", "content": "hi"}]
    whole, streamed = await ask(plans, "/v1/chat/completions", {"messages": messages, "n": n, **fields}, decoder)
    for choice in whole["choices"]:
        if choice["logprobs"] == {"content": [], "refusal": None}:
            choice["logprobs"] = None  # an answer without tokens has no chunk that could say so
    check_same(whole, streamed)
    assert whole["usage"]["prompt_tokens"] == len("user:hi|assistant:")


@pytest.mark.parametrize("cut", range(1, 12))
async def test_one_text_cut_at_every_boundary(cut: int) -> None:
    text = "x<é\U0001f600>ab<>y"
    plan = Plan(text, (cut,), FinishReason.LENGTH)
    body = {"prompt": "ab", "stop": ["b<>", "<>z"], "logprobs": 1, "echo": True}
    for decoder in DECODERS:
        whole, streamed = await ask([plan], "/v1/completions", body, decoder)
        check_same(whole, streamed)
        assert whole["choices"][0]["text"] == "abx<é\U0001f600>a"
        assert whole["choices"][0]["stop_reason"] == "b<>"
