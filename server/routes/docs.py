"""GET /docs: the API, for people. /openapi.json, for programs, is FastAPI's."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from server.docs_page import CONTENT_POLICY, render_docs


def build_router() -> APIRouter:
    """Return the router of this page."""
    router = APIRouter()

    @router.get("/docs", include_in_schema=False)
    async def get_docs(request: Request) -> Response:
        """Show the OpenAPI document."""
        page = render_docs(request.app.openapi())
        headers = {"Content-Security-Policy": CONTENT_POLICY, "X-Content-Type-Options": "nosniff"}
        return Response(page, media_type="text/html", headers=headers)

    return router
