"""Pure ASGI middleware for servers without keys: what somebody else's web page must not do through a user's browser.

Such a server trusts whoever reaches its address. A browser on the same machine does, and runs pages of strangers.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from server.access.auth import OPEN_PATHS
from server.access.refusals import AccessRefusals, Refusal
from server.errors import ErrorKind, RequestError, build_error_response

ANY = "*"
_HOST = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+)(:[0-9]{1,5})?", re.ASCII)
# Nobody can register a name below these, so no stranger's page has one: host.docker.internal is such a name.
_LOCAL_ENDS = (".localhost", ".internal")
_READING = frozenset({"GET", "HEAD", "OPTIONS"})


class HostRules:
    """The names that a server on loopback may be called by.

    A stranger's domain can be made to point at 127.0.0.1, and to a browser the server is then a part of that site. What
    no stranger can own is always taken: addresses, names without a dot, those below .localhost and .internal.

    Args:
        names: Taken as well; ``*`` takes any.
    """

    def __init__(self, names: Iterable[str] = ()) -> None:
        self._names = frozenset(_normalise(name) for name in names)

    def allow(self, header: str) -> bool:
        """Return whether a Host header names this server."""
        if ANY in self._names:
            return True
        match = _HOST.fullmatch(header)
        if match is None:
            return False
        name = _normalise(match[1])
        return name in self._names or "." not in name or name.endswith(_LOCAL_ENDS) or _is_address(name)


def _normalise(name: str) -> str:
    return name.lower().rstrip(".").strip("[]")


def _is_address(name: str) -> bool:
    # As browsers tell one from a name: no top-level domain is a number.
    return name.rpartition(".")[2].isdigit()


class BrowserGuardMiddleware:
    """Refuses what only a stranger's page sends. Other clients send no such headers, or name the server rightly.

    Args:
        app: What answers.
        hosts: By which names it may be called; None = any.
        allowed_origins: Pages that may use the server; ``*`` = all.
        refusals: Told of each request that does not come in.
    """

    def __init__(
        self, app: ASGIApp, *, hosts: HostRules | None, allowed_origins: Collection[str], refusals: AccessRefusals
    ) -> None:
        self._app = app
        self._hosts = hosts
        self._allowed_origins = frozenset(allowed_origins)
        self._refusals = refusals

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            refused = self._check(scope)
            if refused is not None:
                refusal, error = refused
                self._refusals.note(refusal, scope)
                await build_error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> tuple[Refusal, RequestError] | None:
        origin = ""
        is_cross_site = False
        for name, value in scope["headers"]:
            if name == b"host" and self._hosts is not None and not self._hosts.allow(value.decode("latin-1")):
                message = (
                    "This server is not called by the name in the Host header; use 127.0.0.1, or have the server "
                    "started with --allowed-hosts and that name."
                )
                return Refusal.HOST, RequestError(message, kind=ErrorKind.HOST_NOT_ALLOWED)
            if name == b"origin":
                origin = value.decode("latin-1")
            elif name == b"sec-fetch-site":
                is_cross_site = value == b"cross-site"
        # Reading is the browser's to forbid (CORS). Sending without asking first it allows, and a POST has effects.
        if is_cross_site and scope["method"] not in _READING and not self._allowed_origins & {origin, ANY}:
            message = (
                "Pages of other sites may not use this server; have it started with --allowed-origins and this page's "
                "origin."
            )
            return Refusal.ORIGIN, RequestError(message, kind=ErrorKind.ORIGIN_NOT_ALLOWED)
        return None
