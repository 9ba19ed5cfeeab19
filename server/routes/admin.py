"""What only operators may ask: GET and POST /admin/limits, POST /reset_prefix_cache, POST /abort (/abort_requests).

Authentication stands before it; who it is only the log is told.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request

from engine_core import EngineCommand, ResetPrefixCache, SetLimits
from server.engine_client import EngineClient
from server.errors import ErrorKind, RequestError
from server.openapi import describe_body
from server.overload.gate import Gate
from server.principal import get_principal
from server.protocol import parse_abort, parse_limits
from server.request_reader import RequestReader
from server.wire_types import AbortRequest, LimitsRequest

# A step in hand may take seconds; one that takes longer is the watchdog's matter.
_ANSWER_S = 10.0
logger = logging.getLogger(__name__)


def build_router(*, reader: RequestReader, engine_client: EngineClient, gate: Gate) -> APIRouter:
    """Return the router of these endpoints.

    Args:
        reader: Body to wire type.
        engine_client: Carries out what concerns the engine.
        gate: Has the limits, and knows the requests by the ids that clients know.
    """
    router = APIRouter(tags=["administration"])

    @router.get("/admin/limits")
    async def get_limits() -> dict[str, Any]:
        """Tell what the server takes on, what it was started with, and what waits."""
        return _describe(gate)

    @router.post("/admin/limits", openapi_extra=describe_body(LimitsRequest))
    async def set_limits(request: Request) -> dict[str, Any]:
        """Change what the server takes on, until the next change or restart; what is left out stays as it is."""
        wire = await reader.read(request, parse_limits)
        wanted = wire.model_dump(exclude_none=True)
        command = SetLimits(wire.max_num_seqs, wire.max_num_batched_tokens)
        if command != SetLimits():
            try:
                await _ask(engine_client, command)
            except ValueError as error:
                param = next((name for name in wanted if f"`{name}`" in str(error)), None)
                raise RequestError(str(error), kind=ErrorKind.INVALID_VALUE, param=param) from None
        gate.limits = replace(gate.limits, **wanted)
        if wanted:
            _log(request, "limits set: " + ", ".join(f"{name} = {value}" for name, value in wanted.items()))
        return _describe(gate)

    @router.post("/reset_prefix_cache")
    async def reset_prefix_cache(request: Request) -> dict[str, bool]:
        """Forget every cached prefix. Not while requests run, unless `reset_running`: then they are computed again."""
        query = request.query_params
        value = query.get("reset_running") or query.get("reset_running_requests") or "false"
        is_done = await _ask(engine_client, ResetPrefixCache(_read_bool(value)))
        _log(request, "prefix cache emptied" if is_done else "prefix cache not emptied: requests run")
        return {"success": is_done}

    # The second is vLLM's name.
    @router.post("/abort_requests", include_in_schema=False)
    @router.post("/abort", openapi_extra=describe_body(AbortRequest))
    async def abort(request: Request) -> dict[str, Any]:
        """End requests by their X-Request-Id, or by the `id` of their answer."""
        wire = await reader.read(request, parse_abort)
        counts = gate.abort(wire.request_ids)
        num_aborted = sum(counts.values())
        if not num_aborted:
            message = "No request in hand has any of these ids; it may have ended already."
            raise RequestError(message, kind=ErrorKind.NOT_FOUND, param="request_ids")
        _log(request, f"{num_aborted} {'request' if num_aborted == 1 else 'requests'} aborted")
        return {"num_aborted": num_aborted, "not_found": [name for name, count in counts.items() if not count]}

    return router


def _log(request: Request, what: str) -> None:
    key_id = get_principal(request.scope).key_id
    logger.info("%s by %s", what, f"key {key_id}" if key_id else "an operator")


async def _ask(engine_client: EngineClient, command: EngineCommand) -> bool:
    with suppress(TimeoutError):
        async with asyncio.timeout(_ANSWER_S):
            return await engine_client.command(command)
    # It is taken back, but not where the engine has begun with it meanwhile.
    message = (
        f"The engine has not answered within {_ANSWER_S:g} s, and was told to leave it, but may have begun; ask again: "
        "doing it twice does no harm."
    )
    raise RequestError(message, kind=ErrorKind.NOT_READY)


def _describe(gate: Gate) -> dict[str, Any]:
    limits, allocated = gate.limits, gate.allocated
    return {
        "max_num_seqs": limits.max_num_seqs,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_queued_requests": limits.max_queued_requests,
        "max_queued_tokens": limits.max_queued_tokens,
        "allocated": {
            "max_num_seqs": allocated.max_num_seqs,
            "max_num_batched_tokens": allocated.max_num_batched_tokens,
        },
        "num_requests_queued": gate.backlog.num_requests,
        "num_tokens_queued": gate.backlog.num_tokens,
    }


def _read_bool(text: str) -> bool:
    if text.lower() not in ("true", "false", "1", "0"):
        sentence = "`reset_running` must be true or false."
        raise RequestError(sentence, kind=ErrorKind.INVALID_VALUE, param="reset_running")
    return text.lower() in ("true", "1")
