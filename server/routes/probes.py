"""Probes: what machines ask every few seconds. Each answers GET and HEAD alike under all its names, uncounted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from fastapi import APIRouter
from fastapi.routing import APIRoute

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


class UncountedRoute(APIRoute):
    """By its type HttpMetricsMiddleware knows what not to count."""


class ProbeRoute(UncountedRoute):
    """A machine asks it every few seconds."""


def create_probe_router(tag: str) -> APIRouter:
    """Return a router of probes only.

    Args:
        tag: Under which the OpenAPI document lists them.
    """
    return APIRouter(tags=[tag], route_class=ProbeRoute)


def probe(
    router: APIRouter, path: str, *aliases: str, other_methods: tuple[str, ...] = ()
) -> Callable[[Endpoint], Endpoint]:
    """Answer GET and HEAD with the decorated function. The OpenAPI document shows GET at the first path.

    Args:
        router: From create_probe_router.
        path: The first.
        aliases: Further paths.
        other_methods: Which some ask it by, too.
    """

    def register(endpoint: Endpoint) -> Endpoint:
        for each in (path, *aliases):
            # One route for all methods, so that a 405 lists them all.
            methods = ["GET", "HEAD", *other_methods]
            router.add_api_route(each, endpoint, methods=methods, include_in_schema=False)
        # Never reached: it is there for the document, in which each method would be an operation of its own.
        router.add_api_route(path, endpoint, methods=["GET"])
        return endpoint

    return register
