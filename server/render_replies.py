"""What the render endpoints show of a request: what the engine would get. Pure; a part of replies."""

from __future__ import annotations

from typing import Any

from engine_core import SamplingParams
from server.admission import Admitted
from server.generation import GenerationRequest
from server.wire_types import GenerationFields


def describe_prompts(admitted: Admitted, wire: GenerationFields, served_model_name: str) -> list[dict[str, Any]]:
    """Return one engine request a prompt: its choices differ in their seeds only.

    Args:
        admitted: What the engine would get.
        wire: What was sent.
        served_model_name: The one model there is.
    """
    leaders = [request for request in admitted.requests if request.choice == 0]
    return [_describe(request, admitted, wire, served_model_name) for request in leaders]


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
        # The client's own part of it: what its key adds is nobody's business.
        "cache_salt": wire.cache_salt,
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
