"""Public vulnerabilities of other servers, tried here. SECURITY.md lists all, with the tests that lie elsewhere."""

from __future__ import annotations

import time
from typing import Any

import pytest

from engine_core import EngineDeadError, EnginePhase
from server.errors import RequestError
from server.field_names import clean_field_name
from server.http.limits import clean_label
from server.json_text import JSONTextError, decode_json
from server.protocol import parse_chat, parse_completion
from server.stop_strings import StopStrings
from server.wire_types import MAX_CHOICES, MAX_N
from tests.server.fake_engine_client import FakeEngineClient, create_state
from tests.server.http_helpers import build_app, connect

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hi"}]


async def post(path: str, body: dict[str, Any], engine: FakeEngineClient | None = None) -> tuple[int, dict[str, Any]]:
    async with connect(build_app(engine or FakeEngineClient())) as client:
        response = await client.post(path, json=body)
    return response.status_code, response.json()


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", ""], [[1], []], None])
async def test_cve_2024_8768_an_empty_prompt_is_refused_before_the_engine(prompt: Any) -> None:
    engine = FakeEngineClient()
    status, answer = await post(COMPLETIONS, {"prompt": prompt}, engine)
    assert status == 400 and answer["error"]["param"].startswith("prompt")
    assert engine.requests == []


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 20},
        {"n": MAX_N + 1},
        {"n": 10**18},
        {"n": MAX_N, "prompt": ["a"] * (MAX_CHOICES // MAX_N + 1)},
        {"prompt": ["a"] * 10_000},
    ],
)
async def test_cve_2024_8939_cve_2026_34756_one_request_does_not_become_thousands(fields: dict[str, Any]) -> None:
    engine = FakeEngineClient()
    status, _ = await post(COMPLETIONS, {"prompt": "a", **fields}, engine)
    assert status == 400 and engine.requests == []


@pytest.mark.parametrize(
    "field",
    [
        *("n", "max_tokens", "min_tokens", "top_k", "seed", "logprobs", "prompt_logprobs", "priority"),
        *("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    ],
)
@pytest.mark.parametrize("value", [-(2**63) - 1, 2**63, -(2**31) - 1, 10**400, -(10**400), 1e308, -1e308, True, "1"])
def test_cve_2026_21869_every_number_is_checked_before_it_is_used(field: str, value: Any) -> None:
    """A negative count from a JSON body became a write outside an array."""
    body = {"prompt": "a", field: value}
    try:
        wire = parse_completion(body, is_strict=True, on_unknown=print)
    except RequestError as error:
        assert error.param == field and error.reply.status == 400
    else:  # large ones that are cut to the context, or are taken modulo 2**63
        assert field in ("max_tokens", "min_tokens", "top_k", "seed", "priority")
        taken = getattr(wire, field)
        assert isinstance(taken, int) and not isinstance(taken, bool)
        assert taken >= 0 or field in ("seed", "priority")


@pytest.mark.parametrize("token_id", [-1, 2**31, 2**63, 10**400])
async def test_cve_2026_21869_token_ids_out_of_range_reach_no_array(token_id: int) -> None:
    for fields in (
        {"prompt": [token_id]},
        {"stop_token_ids": [token_id]},
        {"logit_bias": {str(token_id): 1}},
        {"allowed_token_ids": [token_id]},
    ):
        engine = FakeEngineClient()
        status, _ = await post(COMPLETIONS, {"prompt": "a", **fields}, engine)
        assert status == 400 and engine.requests == []


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template": "{% for i in range(10**9) %}{% endfor %}"},
        {"chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
        {"chat_template_kwargs": {"tokenize": True}},
        {"chat_template_kwargs": {"enable_thinking": True}},
    ],
)
async def test_cve_2025_61620_cve_2025_62426_no_template_or_variable_of_it_comes_from_a_request(
    fields: dict[str, Any],
) -> None:
    for path, body in ((CHAT, {"messages": MESSAGES}), ("/tokenize", {"messages": MESSAGES})):
        status, answer = await post(path, {**body, **fields})
        assert status == 400 and answer["error"]["param"] in fields


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "(a+)+$"},
        {"guided_json": {"type": "nonsense"}},
        {"structured_outputs": {"regex": "["}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"pattern": "["}}}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": ["?"], "pattern": "["}}}]},
        {"grammar": 'root ::= "' + "(" * 10_000},
    ],
)
async def test_cve_2025_48942_to_48944_no_schema_or_pattern_is_compiled(fields: dict[str, Any]) -> None:
    """Nor cached without bound (CVE-2025-29770, CVE-2025-32381): without structured output it is refused."""
    engine = FakeEngineClient()
    status, _ = await post(CHAT, {"messages": MESSAGES, **fields}, engine)
    assert status == 400 and engine.requests == []


def test_cve_2025_62164_no_tensors_are_taken() -> None:
    for parse, body in ((parse_completion, {"prompt": "a"}), (parse_chat, {"messages": MESSAGES})):
        with pytest.raises(RequestError, match="prompt_embeds"):
            parse({**body, "prompt_embeds": "gASVAAAA"}, is_strict=False, on_unknown=print)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "' + rb"\ud83d" * 100_000 + b'"}',
        b'{"prompt": "' + b"\\" * 600_000 + b'"}',
        b'{"prompt": "' + b'\\"' * 300_000,
        b'"' * 600_000,
        b"\xed\xa0\x80" * 200_000,
        b"[" * 90_000,
        b'{"a":' * 20_000,
        b"-" * 600_000,
        b"1" * 600_000,
        b"0." + b"0" * 600_000 + b"1",
        b'{"prompt": "' + b"u" * 600_000 + rb"\ud",
    ],
)
def test_cve_2025_48887_no_body_takes_more_than_its_length(body: bytes) -> None:
    """A pattern that backtracks takes hours for such a body; these take milliseconds."""
    started = time.thread_time()
    try:
        decode_json(body)
    except JSONTextError as error:
        assert str(error)
    assert time.thread_time() - started < 1.0


def test_cve_2025_46560_texts_are_searched_in_one_pass() -> None:
    """Many ends that look alike, in a text that looks like all of them."""
    started = time.thread_time()
    search = StopStrings(["a" * 255 + chr(98 + number) for number in range(16)]).fork()
    for _ in range(100):
        search.feed("a" * 2_000)
    for text in ("a" * 200_000, "[" * 200_000, "\n" * 200_000, "é" * 200_000):
        assert len(clean_field_name(text)) <= 64
        assert len(clean_label(text)) <= 128
    assert time.thread_time() - started < 2.0


@pytest.mark.parametrize("path", ["/health", "/ready", COMPLETIONS])
async def test_cve_2025_23319_an_engines_last_words_stay_in_the_log(path: str) -> None:
    """The name of a shared memory region in an error message was the first step of three."""
    words = "RuntimeError: cannot map /dev/shm/secret_region at 0x7f0000001000"
    state = create_state(EnginePhase.DEAD, detail=words)
    engine = FakeEngineClient(lambda request: [EngineDeadError(words)], state=state)
    async with connect(build_app(engine)) as client:
        dead = await client.request("GET" if path != COMPLETIONS else "POST", path, json={"prompt": "a"})
        engine.engine_state = create_state()
        dying = await client.post(COMPLETIONS, json={"prompt": "a"})
    for response in (dead, dying):
        assert response.status_code == 503
        assert "secret_region" not in response.text and "0x7f" not in response.text


async def test_cve_2023_30798_no_form_is_parsed() -> None:
    async with connect(build_app(FakeEngineClient())) as client:
        for content_type in ("multipart/form-data; boundary=x", "application/x-www-form-urlencoded"):
            response = await client.post(COMPLETIONS, content=b"a=1&" * 10_000, headers={"Content-Type": content_type})
            assert response.status_code == 415


async def test_cve_2025_10164_no_operator_of_weights_or_code_is_there() -> None:
    """Endpoints through which others load weights, adapters, tensors and code from whoever asks."""
    async with connect(build_app(FakeEngineClient())) as client:
        for path in (
            *(
                "/update_weights",
                "/update_weights_from_tensor",
                "/update_weights_from_disk",
                "/init_weights_update_group",
            ),
            *("/load_lora_adapter", "/v1/load_lora_adapter", "/collective_rpc", "/start_profile", "/encode"),
            *("/v1/rerank", "/rerank", "/api/pull", "/api/create", "/api/push", "/slots/0", "/props", "/jobs"),
        ):
            for method in ("GET", "POST"):
                assert (await client.request(method, path, json={})).status_code == 404, path
