"""create_app: routes, middleware and error handlers put together. Starts and stops no engine."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Protocol

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from starlette.exceptions import HTTPException

from engine_core import EngineDeadError
from server.admission import Admission
from server.engine_client import EngineClient
from server.errors import ClientGoneError, ErrorKind, RequestError, as_request_error, build_error_response
from server.generation import ServerStoppingError
from server.http_limits import BodyLimitMiddleware, LastCatchMiddleware, RequestLabelMiddleware
from server.protocol import ChatRequest, CompletionRequest
from server.request_reader import FieldMetrics, RequestReader
from server.routes import chat, completions, models, ops
from server.routes.generation import GenerationRoute
from server.streaming import StreamTiming

# Nobody reads it: the client has left. The number is what access logs call that.
_STATUS_CLIENT_GONE = 499


class Metrics(FieldMetrics, ops.MetricsPage, Protocol):
    """What the app asks of the server's metrics."""


def create_app(
    *,
    engine_client: EngineClient,
    admission: Admission,
    metrics: Metrics,
    served_model_name: str,
    version: str,
    system_fingerprint: str,
    is_strict: bool = False,
    timing: StreamTiming | None = None,
) -> FastAPI:
    """Return the ASGI application.

    Args:
        engine_client: The engine; its owner starts and stops it.
        admission: Closed when the app shuts down.
        metrics: Shown at /metrics, told of unknown fields.
        served_model_name: The model's name in requests and replies.
        version: Of this server.
        system_fingerprint: Names weights, dtype, kernels and version; part of every reply.
        is_strict: Unknown request fields are refused.
        timing: Of streams; None = the usual.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        admission.close()

    app = FastAPI(title="Pointsman", version=version, redoc_url=None, redirect_slashes=False, lifespan=lifespan)
    route = GenerationRoute(
        reader=RequestReader(metrics=metrics, is_strict=is_strict),
        admission=admission,
        engine_client=engine_client,
        served_model_name=served_model_name,
        system_fingerprint=system_fingerprint,
        timing=timing or StreamTiming(),
        unix_time=time.time,
    )
    app.include_router(completions.build_router(route))
    app.include_router(chat.build_router(route))
    app.include_router(
        models.build_router(engine_client=engine_client, served_model_name=served_model_name, created=int(time.time()))
    )
    app.include_router(
        ops.build_router(
            engine_client=engine_client, metrics=metrics, version=version, system_fingerprint=system_fingerprint
        )
    )
    _add_error_handlers(app)
    # The last one added is the outermost.
    app.add_middleware(LastCatchMiddleware)
    app.add_middleware(BodyLimitMiddleware)
    app.add_middleware(RequestLabelMiddleware)
    app.openapi = _create_openapi(app)  # type: ignore[method-assign]
    return app


def _add_error_handlers(app: FastAPI) -> None:
    async def tell_error(request: Request, error: Exception) -> Response:
        headers = error.headers if isinstance(error, HTTPException) else None
        return build_error_response(as_request_error(error), headers)

    async def tell_invalid(request: Request, error: Exception) -> Response:
        return build_error_response(RequestError("The request is not valid.", kind=ErrorKind.INVALID_VALUE))

    async def tell_nobody(request: Request, error: Exception) -> Response:
        return Response(status_code=_STATUS_CLIENT_GONE)

    for kind in (RequestError, EngineDeadError, ServerStoppingError, HTTPException):
        app.add_exception_handler(kind, tell_error)
    app.add_exception_handler(RequestValidationError, tell_invalid)
    app.add_exception_handler(ClientGoneError, tell_nobody)


def _create_openapi(app: FastAPI) -> Callable[[], dict[str, Any]]:
    # The generating endpoints read their bodies themselves, so FastAPI has not seen these types.
    def build() -> dict[str, Any]:
        if app.openapi_schema:
            return app.openapi_schema
        schema = get_openapi(title=app.title, version=app.version, routes=app.routes)
        schemas = schema.setdefault("components", {}).setdefault("schemas", {})
        for wire_type in (CompletionRequest, ChatRequest):
            own = wire_type.model_json_schema(ref_template="#/components/schemas/{model}")
            schemas.update(own.pop("$defs", {}))
            schemas[wire_type.__name__] = own
        app.openapi_schema = schema
        return schema

    return build
