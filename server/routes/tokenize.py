"""POST /tokenize and /detokenize: what a text or a conversation costs, and what ids say."""

from __future__ import annotations

import functools

from fastapi import APIRouter, Request, Response

from server.admission import Admission
from server.engine_client import EngineClient
from server.json_text import encode_long_json
from server.logprob_replies import show_token
from server.openapi import describe_body
from server.overload.middleware import get_permit
from server.prompts import PromptBuilder, count_chars
from server.protocol import parse_detokenize, parse_tokenize
from server.request_reader import RequestReader
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

    @router.post("/tokenize", openapi_extra=describe_body(TokenizeRequest))
    async def tokenize(request: Request) -> Response:
        """Return the token ids of a prompt, as a generating endpoint would make them."""
        get_permit(request.scope).enter_aside()
        wire = await reader.read(request, parse_tokenize)
        admission.check_model(wire.model)
        num_chars = len(wire.prompt or "") + count_chars(wire.messages or [])
        max_len = engine_client.state.max_model_len or None
        work = threads.run_aside(num_chars, _tokenize, prompts, wire, max_len)
        return Response(await run_while_connected(request.receive, work), media_type="application/json")

    @router.post("/detokenize", openapi_extra=describe_body(DetokenizeRequest))
    async def detokenize(request: Request) -> Response:
        """Return the text of token ids."""
        get_permit(request.scope).enter_aside()
        wire = await reader.read(request, parse_detokenize)
        admission.check_model(wire.model)
        work = threads.run_aside(len(wire.tokens), _detokenize, prompts, wire)
        return Response(await run_while_connected(request.receive, work), media_type="application/json")

    return router


# Both write their replies too: tens of megabytes for the largest body, and not on the event loop.
def _tokenize(prompts: PromptBuilder, wire: TokenizeRequest, max_model_len: int | None) -> bytes:
    if wire.messages is not None:
        prompt = prompts.build_from_messages(
            wire.messages,
            add_generation_prompt=wire.add_generation_prompt is not False,
            add_special_tokens=bool(wire.add_special_tokens),
        )
    else:
        prompt = prompts.build_from_text(wire.prompt or "", add_special_tokens=wire.add_special_tokens is not False)
    token_bytes = prompts.tokenizer.token_bytes
    # The longest texts have millions of tokens, of few kinds.
    show = functools.cache(lambda token_id: show_token(token_bytes(token_id)))
    return encode_long_json(
        {
            "count": len(prompt.token_ids),
            "max_model_len": max_model_len,
            "tokens": prompt.token_ids,
            "token_strs": [show(each) for each in prompt.token_ids] if wire.return_token_strs else None,
        }
    )


def _detokenize(prompts: PromptBuilder, wire: DetokenizeRequest) -> bytes:
    prompts.check_ids(wire.tokens, param="tokens")
    return encode_long_json({"prompt": prompts.tokenizer.decode(wire.tokens, skip_special_tokens=False)})
