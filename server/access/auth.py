"""Pure ASGI middleware that asks for an API key, and ONE table of what opens what.

Everything needs a key, paths that do not exist too: what is open is listed, never what is closed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from server.access.api_keys import KeyRing
from server.access.refusals import AccessRefusals, Refusal
from server.errors import ErrorKind, RequestError, build_error_response
from server.principal import Principal, Scope, set_principal

# Probes, and pages that hold no data: the one at /status asks its reader for a key and sends it like any client.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/readyz", "/ping", "/status"})
# By a path's first part, with all that lies below it. What is not here is for users.
_ADMIN_PARTS = (
    *("admin", "status", "status.json", "reset_prefix_cache", "abort"),
    # As vLLM and SGLang call them: an endpoint that is given one of these names later is an operator's too.
    *("abort_request", "abort_requests", "flush_cache", "pause", "resume", "sleep", "wake_up"),
)
_SCOPES: Mapping[str, Scope] = {**dict.fromkeys(_ADMIN_PARTS, Scope.ADMIN), "metrics": Scope.METRICS}
# Where nobody asked who it is: an open path of a server with keys.
_NOBODY = Principal("", frozenset())
_BEARER = b"bearer "
_POLICY_VIOLATION = 1008


def required_scope(path: str) -> Scope | None:
    """Return what a path needs a key for; None = it is open.

    Args:
        path: Decoded, as the router sees it.
    """
    if path in OPEN_PATHS:
        return None
    # The router takes a line feed at the end for nothing, so /metrics%0A is /metrics.
    return _SCOPES.get(path[1:].partition("/")[0].removesuffix("\n"), Scope.USER)


class AuthMiddleware:
    """Lets nobody in without a key that opens the path. Belongs inside what counts and labels requests.

    Args:
        app: What answers.
        keys: Which are known.
        refusals: Told of each request that does not come in.
    """

    def __init__(self, app: ASGIApp, keys: KeyRing, refusals: AccessRefusals) -> None:
        self._app = app
        self._keys = keys
        self._refusals = refusals

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            needed = required_scope(scope["path"])
            if needed is None:
                set_principal(scope, _NOBODY)
            elif (refused := self._check(scope, needed)) is not None:
                refusal, error = refused
                self._refusals.note(refusal, scope)
                await build_error_response(error, _challenge(refusal))(scope, receive, send)
                return
        elif scope["type"] == "websocket":  # there are none; should there ever be, not around this
            await send({"type": "websocket.close", "code": _POLICY_VIOLATION})
            return
        await self._app(scope, receive, send)

    def _check(self, scope: AsgiScope, needed: Scope) -> tuple[Refusal, RequestError] | None:
        key = _find_key(scope["headers"])
        if key is None:
            message = "This server needs an API key; send the header `Authorization: Bearer KEY`."
            return Refusal.NO_KEY, RequestError(message, kind=ErrorKind.INVALID_API_KEY)
        principal = self._keys.find(key)
        if principal is None:
            message = "This API key is not known here; check it, or ask who runs this server for one."
            return Refusal.UNKNOWN_KEY, RequestError(message, kind=ErrorKind.INVALID_API_KEY)
        if needed not in principal.scopes and Scope.ADMIN not in principal.scopes:
            wanted = " or ".join(dict.fromkeys((needed, Scope.ADMIN)))
            message = (
                f"The scope of this API key is {' and '.join(sorted(principal.scopes))}, and this path needs {wanted}; "
                "use another key."
            )
            return Refusal.SCOPE, RequestError(message, kind=ErrorKind.INSUFFICIENT_SCOPE)
        set_principal(scope, principal)
        return None


def _find_key(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the bearer token; None where there is none, or where there are two and nobody could say which counts."""
    found = None
    for name, value in headers:
        if name == b"authorization":
            if found is not None or value[: len(_BEARER)].lower() != _BEARER:
                return None
            found = value[len(_BEARER) :].strip()
    return found or None


def _challenge(refusal: Refusal) -> dict[str, str]:
    """Return the header that a 401 must have, and a 403 may. Source: RFC 6750, 3."""
    errors = {Refusal.UNKNOWN_KEY: ', error="invalid_token"', Refusal.SCOPE: ', error="insufficient_scope"'}
    return {"WWW-Authenticate": f'Bearer realm="pointsman"{errors.get(refusal, "")}'}
