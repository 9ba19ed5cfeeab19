"""Who sends a request: what the key told, for limits, logs and the prefix cache. Knows no HTTP and no secret."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from starlette.types import Scope as AsgiScope

# The ASGI scope's key under which authentication leaves the Principal.
_PRINCIPAL = "pointsman.principal"


class Scope(enum.StrEnum):
    """What a key opens."""

    USER = "user"  # the API
    ADMIN = "admin"  # everything, the operator's endpoints too
    METRICS = "metrics"  # /metrics only


@dataclass(frozen=True, slots=True)
class Principal:
    """The holder of a key.

    Attributes:
        key_id: Names the key in logs and metrics without telling it; empty where no key is asked for.
        scopes: What it opens.
        cache_salt: Keeps its prompts' cached beginnings apart from other keys'; empty = shared.
    """

    key_id: str
    scopes: frozenset[Scope]
    cache_salt: str = ""


# Everybody, on a server without keys.
ANYBODY = Principal("", frozenset(Scope))


def set_principal(scope: AsgiScope, principal: Principal) -> None:
    """Note on a connection's scope who sends the request."""
    scope[_PRINCIPAL] = principal


def get_principal(scope: AsgiScope) -> Principal:
    """Return who sends the request; ANYBODY where nothing asked."""
    principal = scope.get(_PRINCIPAL, ANYBODY)
    assert isinstance(principal, Principal)
    return principal
