"""create_app: routes, middleware and error handlers put together. Starts and stops no engine."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from engine_core import EngineDeadError
from server.access.refusals import AccessMetrics
from server.access.setup import Access, add_access_middleware
from server.admission import Admission
from server.engine_client import EngineClient
from server.errors import (
    STATUS_CLIENT_GONE,
    ClientGoneError,
    EngineStuckError,
    ErrorKind,
    RequestError,
    ServerStoppingError,
    as_request_error,
    build_error_response,
)
from server.http.http_metrics import HttpMetrics, HttpMetricsMiddleware
from server.http.limits import BodyLimitMiddleware, LastCatchMiddleware, RequestLabelMiddleware
from server.lifecycle.drain import Drain, DrainMiddleware
from server.logs.http_log import HttpLogMiddleware
from server.logs.http_record import note_disconnect
from server.logs.request_log import RequestLog
from server.openapi import create_openapi
from server.overload.gate import Gate, RejectionMetrics
from server.overload.limits import Limits
from server.overload.middleware import PermitMiddleware
from server.request_reader import FieldMetrics, RequestReader
from server.routes import admin, chat, completions, docs, fleet, models, ops, render, status, tokenize
from server.routes.generation import GenerationRoute
from server.status.document import About, FigureSource
from server.status.feed import StatusFeed, StatusSources
from server.streaming import StreamTiming


class Metrics(FieldMetrics, HttpMetrics, AccessMetrics, RejectionMetrics, ops.MetricsPage, FigureSource, Protocol):
    """What the app asks of the server's metrics."""

    def watch(self, read: Callable[[], Mapping[str, float]]) -> None:
        """Read gauges whenever the page is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppSettings:
    """What the application says of itself and how strict it is.

    Attributes:
        served_model_name: The model's name in requests and replies.
        version: Of this server.
        system_fingerprint: Names weights, dtype, kernels and version; part of every reply.
        architecture: The checkpoint's own name for it; None = unknown.
        is_strict: Unknown request fields are refused.
        has_forced_usage: Every stream tells its usage, whether or not it is asked for.
        timing: Of streams.
        access: Who may come in.
        limits: What it takes on at once.
    """

    served_model_name: str
    version: str
    system_fingerprint: str
    architecture: str | None = None
    is_strict: bool = False
    has_forced_usage: bool = False
    timing: StreamTiming = field(default_factory=StreamTiming)
    access: Access = field(default_factory=Access)
    limits: Limits = field(default_factory=Limits)


def create_app(
    *,
    engine_client: EngineClient,
    admission: Admission,
    metrics: Metrics,
    settings: AppSettings,
    drain: Drain | None = None,
    request_log: RequestLog | None = None,
    status_sources: StatusSources | None = None,
) -> FastAPI:
    """Return the ASGI application.

    Args:
        engine_client: The engine; its owner starts and stops it.
        admission: Turns wire requests into engine requests; its threads are closed when the app shuts down.
        metrics: Shown at /metrics, told of unknown fields.
        settings: What it says of itself and how strict it is.
        drain: Begun by whoever ends the server; None = nobody ever does.
        request_log: Told of each request that ends; None = one that traces nothing.
        status_sources: What /status shows beside them; None = nothing yet.

    Returns:
        The application. ``state.status_feed`` is to be closed before it is asked to end: it streams for ever.
    """
    drain = drain or Drain()

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        settings.access.watch.start()
        yield
        settings.access.watch.stop()
        admission.threads.close()

    name = settings.served_model_name
    app = FastAPI(
        title="Pointsman",
        version=settings.version,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=lifespan,
    )
    overload = Gate(engine_client=engine_client, limits=settings.limits, metrics=metrics)
    metrics.watch(overload.read_gauges)
    reader = RequestReader(metrics=metrics, is_strict=settings.is_strict)
    route = _create_generation_route(reader, admission, engine_client, settings)
    app.state.status_feed = status_feed = StatusFeed(
        engine_client=engine_client,
        figures=metrics,
        sources=status_sources or StatusSources(),
        about=About(name, settings.version, time.time()),
        drain=drain,
    )
    for router in (
        completions.build_router(route),
        chat.build_router(route),
        render.build_router(route, served_model_name=name),
        tokenize.build_router(reader=reader, admission=admission, engine_client=engine_client),
        models.build_router(engine_client=engine_client, served_model_name=name, created=int(time.time())),
        ops.build_router(
            engine_client=engine_client,
            drain=drain,
            metrics=metrics,
            version=settings.version,
            system_fingerprint=settings.system_fingerprint,
        ),
        fleet.build_router(
            engine_client=engine_client,
            served_model_name=name,
            version=settings.version,
            architecture=settings.architecture,
        ),
        admin.build_router(reader=reader, engine_client=engine_client, gate=overload),
        status.build_router(feed=status_feed, timing=settings.timing),
        docs.build_router(),
    ):
        app.include_router(router)
    _add_error_handlers(app)
    _add_middleware(app, overload, drain, settings.access, metrics, request_log or RequestLog())
    app.openapi = create_openapi(app, has_keys=settings.access.keys is not None)  # type: ignore[method-assign]
    return app


def _create_generation_route(
    reader: RequestReader, admission: Admission, engine_client: EngineClient, settings: AppSettings
) -> GenerationRoute:
    return GenerationRoute(
        reader=reader,
        admission=admission,
        engine_client=engine_client,
        served_model_name=settings.served_model_name,
        system_fingerprint=settings.system_fingerprint,
        timing=settings.timing,
        unix_time=time.time,
        has_forced_usage=settings.has_forced_usage,
    )


def _add_middleware(
    app: FastAPI, overload: Gate, drain: Drain, access: Access, metrics: Metrics, request_log: RequestLog
) -> None:
    # The last one added is the outermost.
    app.add_middleware(PermitMiddleware, gate=overload)
    app.add_middleware(LastCatchMiddleware)
    app.add_middleware(BodyLimitMiddleware)
    app.add_middleware(DrainMiddleware, drain=drain, on_refused=lambda: metrics.count_rejection("draining"))
    add_access_middleware(app, access, metrics)
    app.add_middleware(RequestLabelMiddleware)
    app.add_middleware(HttpLogMiddleware, request_log=request_log)
    app.add_middleware(HttpMetricsMiddleware, metrics=metrics)


def _add_error_handlers(app: FastAPI) -> None:
    async def tell_error(request: Request, error: Exception) -> Response:
        headers = error.headers if isinstance(error, HTTPException) else None
        return build_error_response(as_request_error(error), headers)

    async def tell_invalid(request: Request, error: Exception) -> Response:
        return build_error_response(RequestError("The request is not valid.", kind=ErrorKind.INVALID_VALUE))

    async def tell_nobody(request: Request, error: Exception) -> Response:
        note_disconnect(request.scope)
        return Response(status_code=STATUS_CLIENT_GONE)

    for kind in (RequestError, EngineDeadError, EngineStuckError, ServerStoppingError, HTTPException):
        app.add_exception_handler(kind, tell_error)
    app.add_exception_handler(RequestValidationError, tell_invalid)
    app.add_exception_handler(ClientGoneError, tell_nobody)
