"""The OpenAPI document: FastAPI's, completed with the bodies, answers and error statuses that FastAPI cannot see.

ONE table of what each path answers; the statuses and codes of errors come from errors.ERROR_TABLE.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from server import reply_types as reply
from server import wire_types
from server.access.auth import required_scope
from server.errors import ERROR_TABLE, ErrorKind

_REF = "#/components/schemas/{model}"
_KEY_SCHEME = "apiKey"
_JSON, _EVENTS, _TEXT = "application/json", "text/event-stream", "text/plain"
# Of every path, before any route is looked at.
_ALWAYS = (
    ErrorKind.MALFORMED_REQUEST,
    ErrorKind.HEADERS_TOO_LARGE,
    ErrorKind.BODY_TOO_LARGE,
    ErrorKind.INTERNAL,
)
# Of every path that may need a key.
_CLOSED = (*_ALWAYS, ErrorKind.INVALID_API_KEY, ErrorKind.INSUFFICIENT_SCOPE, ErrorKind.HOST_NOT_ALLOWED)
# An operation that exists is found, and by its own method; who watches is the status page's own business.
_NEVER = (ErrorKind.NOT_FOUND, ErrorKind.METHOD_NOT_ALLOWED, ErrorKind.TOO_MANY_VIEWERS)
_NOT_READY = (ErrorKind.NOT_READY, ErrorKind.DRAINING, ErrorKind.ENGINE_DEAD, ErrorKind.ENGINE_STUCK)
# Of requests that take a place in the engine's queue.
_OVERLOAD = (
    ErrorKind.QUEUE_FULL,
    ErrorKind.QUEUE_TIMEOUT,
    ErrorKind.RATE_LIMITED,
    ErrorKind.REQUEST_TIMEOUT,
    ErrorKind.CANCELLED,
)
_GENERATING = tuple(kind for kind in ErrorKind if kind not in _NEVER)
# Text work waits for no place, but it is one of its key's requests.
_WITH_BODY = tuple(kind for kind in _GENERATING if kind not in _OVERLOAD or kind is ErrorKind.RATE_LIMITED)
_FIELDS = (
    ErrorKind.MALFORMED_BODY,
    ErrorKind.INVALID_VALUE,
    ErrorKind.MISSING_PARAMETER,
    ErrorKind.UNKNOWN_PARAMETER,
    ErrorKind.UNSUPPORTED_MEDIA_TYPE,
)
_COMMAND = (*_CLOSED, ErrorKind.NOT_READY, ErrorKind.ENGINE_DEAD)
_LOOK_UP = (*_CLOSED, ErrorKind.MODEL_NOT_FOUND)


@dataclass(frozen=True, slots=True)
class _Answers:
    """One row: what a path answers.

    Attributes:
        ok: Type of its JSON; None = it answers in plain text.
        errors: What may go wrong.
        chunk: Type of each event, where it streams too.
        error: Type of a 503's JSON.
        is_list: The answer is a list of `ok`.
    """

    ok: type[BaseModel] | None
    errors: tuple[ErrorKind, ...] = _CLOSED
    chunk: type[BaseModel] | None = None
    error: type[BaseModel] = reply.ErrorReply
    is_list: bool = False


_TABLE: Mapping[str, _Answers] = {
    "/v1/completions": _Answers(reply.CompletionReply, _GENERATING, reply.CompletionChunk),
    "/v1/chat/completions": _Answers(reply.ChatReply, _GENERATING, reply.ChatChunk),
    "/v1/completions/render": _Answers(reply.RenderedRequest, _WITH_BODY, is_list=True),
    "/v1/chat/completions/render": _Answers(reply.RenderedRequest, _WITH_BODY),
    "/tokenize": _Answers(reply.TokenizeReply, _WITH_BODY),
    "/detokenize": _Answers(reply.DetokenizeReply, _WITH_BODY),
    "/v1/models": _Answers(reply.ModelList),
    "/v1/models/{model_id}": _Answers(reply.ModelCard, _LOOK_UP),
    "/health": _Answers(reply.Status, (*_ALWAYS, ErrorKind.ENGINE_DEAD), error=reply.NotReadyReply),
    "/ready": _Answers(reply.Status, (*_ALWAYS, *_NOT_READY), error=reply.NotReadyReply),
    "/ping": _Answers(reply.Status, _ALWAYS),
    "/version": _Answers(reply.VersionReply),
    "/metrics": _Answers(None),
    "/load": _Answers(reply.LoadReply),
    "/get_load": _Answers(reply.WorkerLoadReply),
    "/is_sleeping": _Answers(reply.SleepReply),
    "/get_server_info": _Answers(reply.KVBlockInfo, (*_CLOSED, ErrorKind.NOT_READY)),
    "/server_info": _Answers(reply.WorkerInfo),
    "/model_info": _Answers(reply.ModelInfo),
    "/admin/limits": _Answers(reply.LimitsReply, (*_COMMAND, *_FIELDS)),
    "/reset_prefix_cache": _Answers(reply.ResetReply, (*_COMMAND, ErrorKind.INVALID_VALUE)),
    "/abort": _Answers(reply.AbortReply, (*_CLOSED, *_FIELDS, ErrorKind.NOT_FOUND)),
}
_DESCRIPTION = (
    "OpenAI's HTTP API, with vLLM's extensions. Every answer has an X-Request-Id; a 429, and a 503 that is worth "
    "another try, has a Retry-After. Where the server has keys, send `Authorization: Bearer KEY`."
)


class UndocumentedError(Exception):
    """A route has no row in the table, or a body that wire_types.py does not know."""


def create_openapi(app: FastAPI, *, has_keys: bool) -> Callable[[], dict[str, Any]]:
    """Return what builds the document, once; to be put in place of ``app.openapi``.

    Args:
        app: With all its routes.
        has_keys: It asks for API keys.
    """

    def build() -> dict[str, Any]:
        if app.openapi_schema is None:
            app.openapi_schema = build_document(app, has_keys=has_keys)
        return app.openapi_schema

    return build


def build_document(app: FastAPI, *, has_keys: bool = False) -> dict[str, Any]:
    """Return the document of an application's routes.

    Args:
        app: With all its routes.
        has_keys: It asks for API keys: the document says where, and pages that are made of it ask for one.

    Raises:
        UndocumentedError: A route is not documented.
    """
    document = get_openapi(title=app.title, version=app.version, description=_DESCRIPTION, routes=app.routes)
    schemas: dict[str, Any] = {}
    for path, operations in document["paths"].items():
        if path not in _TABLE:
            raise UndocumentedError(f"{path} has no row in server.openapi._TABLE: say there what it answers")
        for operation in operations.values():
            operation["responses"] = _build_responses(_TABLE[path], schemas)
            _add_body(operation, schemas)
    document["components"] = {"schemas": dict(sorted(schemas.items()))}
    if has_keys:
        document["components"]["securitySchemes"] = {_KEY_SCHEME: {"type": "http", "scheme": "bearer"}}
        for path, operations in document["paths"].items():
            for operation in operations.values():
                operation["security"] = [{_KEY_SCHEME: []}] if required_scope(path) is not None else []
    return document


def _build_responses(answers: _Answers, schemas: dict[str, Any]) -> dict[str, Any]:
    responses = {"200": {"description": "Success", "content": _build_content(answers, schemas)}}
    for status, codes in _codes_by_status(answers.errors).items():
        # A 503 of a probe says more than an error; its other errors are the usual ones.
        error = answers.error if status == 503 else reply.ErrorReply
        content = {_JSON: {"schema": _add_schema(error, schemas)}}
        responses[str(status)] = {"description": f"`code` is {_join(codes)}", "content": content}
    return responses


def _build_content(answers: _Answers, schemas: dict[str, Any]) -> dict[str, Any]:
    if answers.ok is None:
        return {_TEXT: {"schema": {"type": "string"}}}
    one = _add_schema(answers.ok, schemas)
    content: dict[str, Any] = {_JSON: {"schema": {"type": "array", "items": one} if answers.is_list else one}}
    if answers.chunk is not None:
        _add_schema(answers.chunk, schemas)
        text = f"With `stream`: true. Each event's data is a {answers.chunk.__name__}; the last is `[DONE]`."
        # No type: OpenAPI 3.1 cannot say what one event is, and readers differ on whether this is about one or all.
        content[_EVENTS] = {"schema": {"description": text}}
    return content


def _codes_by_status(kinds: Iterable[ErrorKind]) -> dict[int, list[str]]:
    codes: defaultdict[int, list[str]] = defaultdict(list)
    for kind in kinds:
        row = ERROR_TABLE[kind]
        codes[row.status].append(row.code)
    return dict(sorted(codes.items()))


def _add_body(operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    # The routes read their bodies themselves and tell FastAPI no more than the type's name.
    for content in operation.get("requestBody", {}).get("content", {}).values():
        name = content["schema"]["$ref"].rsplit("/", 1)[1]
        wire_type = getattr(wire_types, name, None)
        if wire_type is None:
            raise UndocumentedError(f"server.wire_types has no {name}, which a route takes as its body")
        _add_schema(wire_type, schemas)


def _add_schema(model: type[BaseModel], schemas: dict[str, Any]) -> dict[str, Any]:
    """Add a type's schema, with those that it uses, and return what refers to it."""
    schema = model.model_json_schema(ref_template=_REF, mode="validation")
    schemas.update(schema.pop("$defs", {}))
    schemas[model.__name__] = schema
    return {"$ref": _REF.format(model=model.__name__)}


def _join(codes: list[str]) -> str:
    *most, last = [f"`{code}`" for code in codes]
    return f"{', '.join(most)} or {last}" if most else last


def describe_body(wire_type: type[BaseModel]) -> dict[str, Any]:
    """Return the part of a route's description for a body that the route reads itself."""
    schema = {"$ref": f"#/components/schemas/{wire_type.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
