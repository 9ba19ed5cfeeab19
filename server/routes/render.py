"""POST /v1/completions/render and /v1/chat/completions/render: what the engine would get, without running it.

Routers ask it to place a request by its prefix; people ask it to see what a chat template made of their messages.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from engine_core import SamplingParams
from server.admission import Admitted
from server.generation import GenerationRequest
from server.protocol import parse_chat, parse_completion
from server.routes.generation import GenerationRoute
from server.streaming import run_while_connected
from server.wire_types import ChatRequest, CompletionRequest, GenerationFields


def build_router(route: GenerationRoute, *, served_model_name: str) -> APIRouter:
    """Return the router of these endpoints.

    Args:
        route: What the generating endpoints are made of.
        served_model_name: The one model there is.
    """
    router = APIRouter(tags=["tokens"])

    @router.post("/v1/completions/render", openapi_extra=route.describe_body(CompletionRequest))
    async def render_completion(request: Request) -> list[dict[str, Any]]:
        """Return one engine request a prompt."""
        wire = await route.reader.read(request, parse_completion)
        admitted = await run_while_connected(request.receive, route.admission.admit_completion(wire))
        return [_describe(each, admitted, wire, served_model_name) for each in _get_leaders(admitted)]

    @router.post("/v1/chat/completions/render", openapi_extra=route.describe_body(ChatRequest))
    async def render_chat_completion(request: Request) -> dict[str, Any]:
        """Return the engine request that a conversation becomes."""
        wire = await route.reader.read(request, parse_chat)
        admitted = await run_while_connected(request.receive, route.admission.admit_chat(wire))
        return _describe(admitted.requests[0], admitted, wire, served_model_name)

    return router


def _get_leaders(admitted: Admitted) -> list[GenerationRequest]:
    """The first choice of each prompt: the others differ in their seeds only."""
    return [request for request in admitted.requests if request.choice == 0]


def _describe(
    request: GenerationRequest, admitted: Admitted, wire: GenerationFields, served_model_name: str
) -> dict[str, Any]:
    engine_request = request.engine_request
    return {
        "request_id": admitted.response_id,
        "model": served_model_name,
        "token_ids": engine_request.prompt_token_ids,
        "prompt": request.prompt.text,
        "sampling_params": _describe_sampling(engine_request.sampling_params, request, wire),
        "priority": engine_request.priority,
        "cache_salt": engine_request.cache_salt or None,
        "stream": bool(wire.stream),
    }


def _describe_sampling(params: SamplingParams, request: GenerationRequest, wire: GenerationFields) -> dict[str, Any]:
    return {
        "n": request.n,
        "max_tokens": 0 if request.is_prompt_only else params.max_tokens,
        "min_tokens": params.min_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "min_p": params.min_p,
        "presence_penalty": params.presence_penalty,
        "frequency_penalty": params.frequency_penalty,
        "repetition_penalty": params.repetition_penalty,
        "logit_bias": {str(token_id): bias for token_id, bias in params.logit_bias.items()},
        "seed": wire.seed,
        "stop": list(wire.stop),
        "stop_token_ids": sorted(params.stop_token_ids),
        "include_stop_str_in_output": request.shows_stop,
        "ignore_eos": params.ignore_eos,
        "logprobs": params.num_logprobs,
        "prompt_logprobs": params.num_prompt_logprobs,
    }
