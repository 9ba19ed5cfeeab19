"""PermitMiddleware: pure ASGI; each request has a Permit from its head to the last byte of its answer."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.limits import get_label
from server.overload.gate import Gate, Permit
from server.principal import get_principal

# The ASGI scope's key under which the Permit stands.
_PERMIT = "pointsman.permit"


class PermitMiddleware:
    """Hands each request its permit, and takes it back however the request ends. Refuses nobody: routes enter.

    Belongs within authentication and labels.

    Args:
        app: What answers.
        gate: Gives the permits.
    """

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._gate.create_permit(get_principal(scope), get_label(scope)) as permit:
            scope[_PERMIT] = permit
            await self._app(scope, receive, send)


def get_permit(scope: Scope) -> Permit:
    """Return a request's permit."""
    permit = scope[_PERMIT]
    assert isinstance(permit, Permit)
    return permit
