"""POST /v1/chat/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from server.openapi import describe_body
from server.principal import get_principal
from server.prompts import count_chars
from server.protocol import parse_chat
from server.replies import ChatShape
from server.routes.direct_route import DirectRoute
from server.routes.generation import GenerationRoute
from server.streaming import run_while_connected
from server.wire_types import ChatRequest


def build_router(route: GenerationRoute) -> APIRouter:
    """Return the router of this endpoint."""
    router = APIRouter(tags=["generation"], route_class=DirectRoute)

    @router.post("/v1/chat/completions", openapi_extra=describe_body(ChatRequest))
    async def create_chat_completion(request: Request) -> Response:
        """Answer a conversation."""
        permit = route.let_in(request)
        wire = await route.reader.read(request, parse_chat)
        principal = get_principal(request.scope)
        num_choices = wire.n or 1
        permit.reserve(num_choices, num_choices * count_chars(wire.messages))
        admitted = route.admission.try_admit_chat(wire, principal)
        if admitted is None:
            admitted = await run_while_connected(request.receive, route.admission.admit_chat(wire, principal))
        return await route.answer(request, wire, admitted, ChatShape)

    return router
