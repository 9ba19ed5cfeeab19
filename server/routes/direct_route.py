"""DirectRoute: for endpoints that read their requests themselves."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute


class DirectRoute(APIRoute):
    """Calls its endpoint with the request and nothing else.

    FastAPI would look for dependencies and parameters first, for about 100 us, where there are none. Dependencies of
    the application, or of whoever includes the route, are not called either: what every request must pass is a
    middleware.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the endpoint: an ``async def`` of one Request that returns a Response."""
        endpoint: Callable[[Request], Coroutine[Any, Any, Response]] = self.endpoint
        return endpoint
