"""POST /v1/completions/render and /v1/chat/completions/render: what the engine would get, without running it.

Routers ask it to place a request by its prefix; people ask it to see what a chat template made of their messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from fastapi import APIRouter, Request, Response

from server.json_text import encode_long_json
from server.openapi import describe_body
from server.overload.middleware import get_permit
from server.protocol import parse_chat, parse_completion
from server.render_replies import describe_prompts
from server.routes.generation import GenerationRoute
from server.streaming import run_while_connected
from server.wire_types import ChatRequest, CompletionRequest


def build_router(route: GenerationRoute, *, served_model_name: str) -> APIRouter:
    """Return the router of these endpoints.

    Args:
        route: What the generating endpoints are made of.
        served_model_name: The one model there is.
    """
    router = APIRouter(tags=["tokens"])

    async def respond(describe: Callable[[], Any]) -> Response:
        # A prompt may have hundreds of thousands of ids: not on the event loop.
        body = await asyncio.to_thread(lambda: encode_long_json(describe()))
        return Response(body, media_type="application/json")

    @router.post("/v1/completions/render", openapi_extra=describe_body(CompletionRequest))
    async def render_completion(request: Request) -> Response:
        """Return one engine request a prompt."""
        get_permit(request.scope).enter_aside()
        wire = await route.reader.read(request, parse_completion)
        admitted = await run_while_connected(request.receive, route.admission.admit_completion(wire, is_aside=True))
        return await respond(lambda: describe_prompts(admitted, wire, served_model_name))

    @router.post("/v1/chat/completions/render", openapi_extra=describe_body(ChatRequest))
    async def render_chat_completion(request: Request) -> Response:
        """Return the engine request that a conversation becomes."""
        get_permit(request.scope).enter_aside()
        wire = await route.reader.read(request, parse_chat)
        admitted = await run_while_connected(request.receive, route.admission.admit_chat(wire, is_aside=True))
        return await respond(lambda: describe_prompts(admitted, wire, served_model_name)[0])

    return router
