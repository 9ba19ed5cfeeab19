from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from pydantic import TypeAdapter

from engine_core import EnginePhase
from server import reply_types as reply
from server.access.api_keys import KeyRing, parse_api_key
from server.access.auth import OPEN_PATHS
from server.access.setup import Access
from server.errors import ERROR_TABLE, ErrorKind
from server.generation import LikelyToken, TokenText
from server.logprob_replies import build_chat_logprobs, build_completion_logprobs, build_prompt_logprobs
from server.openapi import UndocumentedError, build_document
from tests.server.fake_engine_client import FakeEngineClient, create_state
from tests.server.http_helpers import MODEL, build_app, connect, get_chunks

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TEXT_BODY: dict[str, Any] = {"prompt": "hi"}
CHAT_BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return build_document(build_app(FakeEngineClient()))


def test_it_is_openapi_3_1_with_unique_operations_and_references_that_resolve(document: dict[str, Any]) -> None:
    assert document["openapi"].startswith("3.1.")
    operations = [operation for methods in document["paths"].values() for operation in methods.values()]
    ids = [operation["operationId"] for operation in operations]
    assert len(set(ids)) == len(ids)
    references = {part.split('"')[0] for part in json.dumps(document).split("#/components/schemas/")[1:]}
    assert references <= set(document["components"]["schemas"])
    assert all(response["description"] for operation in operations for response in operation["responses"].values())


def test_what_needs_a_key_documents_its_401_and_what_does_not_has_none(document: dict[str, Any]) -> None:
    documented = {
        path for path, methods in document["paths"].items() if "401" in next(iter(methods.values()))["responses"]
    }
    assert documented == {path for path in document["paths"] if path not in OPEN_PATHS}


def test_a_server_with_keys_says_so_of_each_path_that_needs_one_and_one_without_of_none(
    document: dict[str, Any],
) -> None:
    access = Access(keys=KeyRing([parse_api_key("sk-0123456789abcdef")]))
    keyed = build_app(FakeEngineClient(), access=access).openapi()
    ((scheme, described),) = keyed["components"]["securitySchemes"].items()
    assert described == {"type": "http", "scheme": "bearer"}
    for path, methods in keyed["paths"].items():
        for operation in methods.values():
            assert operation["security"] == ([] if path in OPEN_PATHS else [{scheme: []}]), path
    assert "securitySchemes" not in document["components"] and "security" not in json.dumps(document["paths"])


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_an_endpoint_with_a_body_names_every_code_under_its_status(document: dict[str, Any], path: str) -> None:
    responses = document["paths"][path]["post"]["responses"]
    kinds = set(ErrorKind) - {ErrorKind.NOT_FOUND, ErrorKind.METHOD_NOT_ALLOWED, ErrorKind.TOO_MANY_VIEWERS}
    assert set(responses) == {"200", *(str(ERROR_TABLE[kind].status) for kind in kinds)}
    for kind in kinds:
        row = ERROR_TABLE[kind]
        assert f"`{row.code}`" in responses[str(row.status)]["description"]
        schema = responses[str(row.status)]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/ErrorReply"}
    assert set(responses["200"]["content"]) == {"application/json", "text/event-stream"}
    assert set(responses["200"]["content"]["text/event-stream"]["schema"]) == {"description"}


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", f"{COMPLETIONS}/render", f"{CHAT}/render"])
def test_text_work_is_limited_by_key_but_waits_for_no_place(document: dict[str, Any], path: str) -> None:
    responses = document["paths"][path]["post"]["responses"]
    assert "`rate_limit_exceeded`" in responses["429"]["description"]
    assert "`queue_full`" not in responses["503"]["description"]


def test_probes_document_their_503_and_nobody_a_422(document: dict[str, Any]) -> None:
    for path in ("/health", "/ready"):
        schema = document["paths"][path]["get"]["responses"]["503"]["content"]["application/json"]["schema"]
        assert schema == {"$ref": "#/components/schemas/NotReadyReply"}
    statuses = {
        status for methods in document["paths"].values() for each in methods.values() for status in each["responses"]
    }
    assert "422" not in statuses
    assert "404" in document["paths"]["/v1/models/{model_id}"]["get"]["responses"]
    assert set(document["paths"]["/metrics"]["get"]["responses"]["200"]["content"]) == {"text/plain"}


def test_a_route_without_a_row_is_noticed() -> None:
    app = build_app(FakeEngineClient())
    app.add_api_route("/new", lambda: None, methods=["GET"])
    with pytest.raises(UndocumentedError, match="/new has no row"):
        build_document(app)


@pytest.mark.parametrize(
    ("path", "answer_type"),
    [
        ("/v1/models", reply.ModelList),
        (f"/v1/models/{MODEL}", reply.ModelCard),
        ("/health", reply.Status),
        ("/ready", reply.Status),
        ("/ping", reply.Status),
        ("/version", reply.VersionReply),
        ("/load", reply.LoadReply),
        ("/get_load", reply.WorkerLoadReply),
        ("/is_sleeping", reply.SleepReply),
        ("/get_server_info", reply.KVBlockInfo),
        ("/server_info", reply.WorkerInfo),
        ("/model_info", reply.ModelInfo),
        ("/v1/models/other", reply.ErrorReply),
    ],
)
async def test_what_is_read_is_as_documented(path: str, answer_type: type[reply.Status]) -> None:
    async with connect(build_app(FakeEngineClient())) as client:
        check_reply(await client.get(path), answer_type)


async def test_what_is_generated_is_as_documented() -> None:
    async with connect(build_app(FakeEngineClient())) as client:
        check_reply(await client.post(COMPLETIONS, json=TEXT_BODY), reply.CompletionReply)
        check_reply(await client.post(CHAT, json=CHAT_BODY), reply.ChatReply)
        check_reply(await client.post(CHAT, json={}), reply.ErrorReply)
        check_reply(await client.post("/tokenize", json=TEXT_BODY), reply.TokenizeReply)
        check_reply(await client.post("/detokenize", json={"tokens": [65]}), reply.DetokenizeReply)
        check_reply(await client.post(f"{CHAT}/render", json=CHAT_BODY), reply.RenderedRequest)
        (rendered,) = (await client.post(f"{COMPLETIONS}/render", json=TEXT_BODY)).json()
        reply.RenderedRequest.model_validate(rendered)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        for chunk in await get_chunks(await client.post(COMPLETIONS, json={**TEXT_BODY, **options})):
            reply.CompletionChunk.model_validate(chunk)
        for chunk in await get_chunks(await client.post(CHAT, json={**CHAT_BODY, **options})):
            reply.ChatChunk.model_validate(chunk)


def test_logprobs_are_as_documented() -> None:
    likely = (LikelyToken(9, b" three", -0.5),)
    first = TokenText(7, "é".encode()[:1], 0, None, None, ())
    second = TokenText(8, b" two", 1, float("-inf"), 2, likely)
    reply.CompletionLogprobs.model_validate(build_completion_logprobs([first, second]))
    reply.ChatLogprobs.model_validate(build_chat_logprobs([second]))
    TypeAdapter(reply.PromptLogprobs).validate_python(build_prompt_logprobs([first, second]))


async def test_a_probe_that_says_no_is_as_documented() -> None:
    async with connect(build_app(FakeEngineClient(state=create_state(EnginePhase.DEAD)))) as client:
        check_reply(await client.get("/health"), reply.NotReadyReply)
        check_reply(await client.get("/ready"), reply.NotReadyReply)


def check_reply(response: httpx.Response, answer_type: type[Any]) -> None:
    """The body is of that type, and has no field that the type does not know."""
    answer = answer_type.model_validate_json(response.content)
    assert response.json() == answer.model_dump(exclude_unset=True)
