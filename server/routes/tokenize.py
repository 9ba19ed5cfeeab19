"""POST /tokenize and /detokenize: what a text or a conversation costs, and what ids say."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from server.admission import Admission
from server.engine_client import EngineClient
from server.generation import Prompt
from server.logprob_replies import show_token
from server.prompts import PromptBuilder, count_chars
from server.protocol import parse_detokenize, parse_tokenize
from server.request_reader import RequestReader
from server.routes.generation import GenerationRoute
from server.streaming import run_while_connected
from server.wire_types import DetokenizeRequest, TokenizeRequest


def build_router(*, reader: RequestReader, admission: Admission, engine_client: EngineClient) -> APIRouter:
    """Return the router of these endpoints.

    Args:
        reader: Body to wire type.
        admission: Knows which model is served, and how its prompts are made.
        engine_client: Knows the context length.
    """
    prompts, threads = admission.prompts, admission.threads
    router = APIRouter(tags=["tokens"])

    @router.post("/tokenize", openapi_extra=GenerationRoute.describe_body(TokenizeRequest))
    async def tokenize(request: Request) -> dict[str, Any]:
        """Return the token ids of a prompt, as a generating endpoint would make them."""
        wire = await reader.read(request, parse_tokenize)
        admission.check_model(wire.model)
        num_chars = len(wire.prompt or "") + count_chars(wire.messages or [])
        work = threads.run(num_chars, _tokenize, prompts, wire)
        prompt, token_strs = await run_while_connected(request.receive, work)
        return {
            "count": len(prompt.token_ids),
            "max_model_len": engine_client.state.max_model_len or None,
            "tokens": prompt.token_ids,
            "token_strs": token_strs,
        }

    @router.post("/detokenize", openapi_extra=GenerationRoute.describe_body(DetokenizeRequest))
    async def detokenize(request: Request) -> dict[str, Any]:
        """Return the text of token ids."""
        wire = await reader.read(request, parse_detokenize)
        admission.check_model(wire.model)
        work = threads.run(len(wire.tokens), _detokenize, prompts, wire)
        return {"prompt": await run_while_connected(request.receive, work)}

    return router


def _tokenize(prompts: PromptBuilder, wire: TokenizeRequest) -> tuple[Prompt, list[str] | None]:
    if wire.messages is not None:
        prompt = prompts.build_from_messages(
            wire.messages,
            add_generation_prompt=wire.add_generation_prompt is not False,
            add_special_tokens=bool(wire.add_special_tokens),
        )
    else:
        prompt = prompts.build_from_text(wire.prompt or "", add_special_tokens=wire.add_special_tokens is not False)
    if not wire.return_token_strs:
        return prompt, None
    return prompt, [show_token(prompts.tokenizer.token_bytes(token_id)) for token_id in prompt.token_ids]


def _detokenize(prompts: PromptBuilder, wire: DetokenizeRequest) -> str:
    prompts.check_ids(wire.tokens, param="tokens")
    return prompts.tokenizer.decode(wire.tokens, skip_special_tokens=False)
