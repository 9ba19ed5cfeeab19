"""GET /status: a live page for people, to which / leads; /status/events and /status.json: what it shows."""

from __future__ import annotations

from fastapi import APIRouter, Response
from fastapi.responses import RedirectResponse

from server.json_text import encode_json
from server.routes.probes import UncountedRoute
from server.status.feed import StatusFeed
from server.status.page import load_page
from server.streaming import EventStream, StreamTiming

_UNSTORED = {"Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}


def build_router(*, feed: StatusFeed, timing: StreamTiming) -> APIRouter:
    """Return the router of these endpoints.

    Args:
        feed: What there is to see.
        timing: Of its stream.
    """
    router = APIRouter(route_class=UncountedRoute)

    @router.api_route("/status", methods=["GET", "HEAD"], include_in_schema=False)
    async def get_page() -> Response:
        """Show the page, which holds no data."""
        page = load_page()
        headers = {**_UNSTORED, "Content-Security-Policy": page.content_policy, "Referrer-Policy": "no-referrer"}
        return Response(page.body, media_type="text/html", headers=headers)

    @router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
    async def go_to_page() -> Response:
        """Bring a browser that was given the server's address alone to the page."""
        return RedirectResponse("/status")

    @router.get("/status.json", include_in_schema=False)
    async def get_document() -> Response:
        """Tell once what the page would show."""
        body = encode_json(await feed.take_document())
        return Response(body, media_type="application/json", headers=_UNSTORED)

    @router.get("/status/events", include_in_schema=False)
    async def get_events() -> Response:
        """Tell it every second."""
        return EventStream(feed.watch(), timing=timing)

    return router
