"""POST /v1/completions."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from server.openapi import describe_body
from server.principal import get_principal
from server.protocol import parse_completion
from server.replies import CompletionShape
from server.routes.direct_route import DirectRoute
from server.routes.generation import GenerationRoute
from server.streaming import run_while_connected
from server.wire_types import CompletionRequest


def build_router(route: GenerationRoute) -> APIRouter:
    """Return the router of this endpoint."""
    router = APIRouter(tags=["generation"], route_class=DirectRoute)

    @router.post("/v1/completions", openapi_extra=describe_body(CompletionRequest))
    async def create_completion(request: Request) -> Response:
        """Continue one or several prompts."""
        permit = route.let_in(request)
        wire = await route.reader.read(request, parse_completion)
        principal = get_principal(request.scope)
        num_choices = wire.n or 1
        permit.reserve(num_choices * len(wire.prompt), num_choices * sum(map(len, wire.prompt)))
        admitted = route.admission.try_admit_completion(wire, principal)
        if admitted is None:
            admitted = await run_while_connected(request.receive, route.admission.admit_completion(wire, principal))
        return await route.answer(request, wire, admitted, CompletionShape, echo=bool(wire.echo))

    return router
