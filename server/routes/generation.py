"""What the generating endpoints share: from an admitted request to a response, streamed or whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from fastapi import Request, Response

from server.admission import Admission, Admitted
from server.engine_client import EngineClient
from server.json_text import encode_json, encode_long_json
from server.logs.http_record import AnswerNote, note_answer
from server.output_text import TokenBytes
from server.overload.gate import Permit
from server.overload.middleware import get_permit
from server.replies import ReplyHead, ReplyOptions, ReplyShape
from server.reply_events import build_events
from server.request_reader import RequestReader
from server.streaming import EventStream, StreamTiming, collect_choices, run_while_connected
from server.wire_types import GenerationFields


class ShapeFactory(Protocol):
    """CompletionShape or ChatShape."""

    def __call__(self, head: ReplyHead, options: ReplyOptions, token_bytes: TokenBytes) -> ReplyShape: ...


class GenerationRoute:
    """The parts that a generating endpoint is made of.

    Args:
        reader: Body to wire type.
        admission: Wire type to engine requests.
        engine_client: Runs them.
        served_model_name: What replies call the model.
        system_fingerprint: Names what computes the replies.
        timing: Of streams.
        unix_time: The time of day, in seconds.
        has_forced_usage: Every stream tells its usage, whether or not the client asks.
    """

    def __init__(
        self,
        *,
        reader: RequestReader,
        admission: Admission,
        engine_client: EngineClient,
        served_model_name: str,
        system_fingerprint: str,
        timing: StreamTiming,
        unix_time: Callable[[], float],
        has_forced_usage: bool = False,
    ) -> None:
        self.reader = reader
        self.admission = admission
        self._engine_client = engine_client
        self._served_model_name = served_model_name
        self._system_fingerprint = system_fingerprint
        self._timing = timing
        self._unix_time = unix_time
        self._has_forced_usage = has_forced_usage

    def let_in(self, request: Request) -> Permit:
        """Let a request in, before its body is read; return what it holds until it is answered.

        Raises:
            RequestError: The server is full, or its key has too many requests.
        """
        permit = get_permit(request.scope)
        permit.enter()
        return permit

    async def answer(
        self,
        request: Request,
        wire: GenerationFields,
        admitted: Admitted,
        create_shape: ShapeFactory,
        *,
        echo: bool = False,
    ) -> Response:
        """Run an admitted request and return its response.

        Args:
            request: As it came.
            wire: Its body.
            admitted: What becomes of it.
            create_shape: How its reply looks.
            echo: The prompt stands before its continuation.

        Raises:
            RequestError: It failed before anything was sent, or its prompts are more than may wait now.
            ClientGoneError: The client left.
            EngineDeadError: The engine died.
        """
        self._note(request, wire, admitted)
        get_permit(request.scope).admit(admitted.response_id, admitted.requests)
        head = ReplyHead(
            admitted.response_id, int(self._unix_time()), self._served_model_name, self._system_fingerprint
        )
        options = ReplyOptions(
            echo=echo,
            has_logprobs=wire.num_logprobs is not None,
            has_prompt_logprobs=wire.prompt_logprobs is not None,
            has_usage=wire.has_stream_usage or self._has_forced_usage,
            has_continuous_usage=wire.has_continuous_usage,
        )
        shape = create_shape(head, options, self.admission.prompts.tokenizer.token_bytes)
        if wire.stream:
            events = build_events(self._engine_client, admitted.requests, shape, has_usage=options.has_usage)
            return EventStream(events, timing=self._timing)
        choices = await run_while_connected(request.receive, collect_choices(self._engine_client, admitted.requests))
        if options.has_logprobs or options.has_prompt_logprobs:
            body = await asyncio.to_thread(lambda: encode_long_json(shape.build_reply(choices)))
        else:
            body = encode_json(shape.build_reply(choices))
        return Response(body, media_type="application/json")

    def _note(self, request: Request, wire: GenerationFields, admitted: Admitted) -> None:
        """Note for log and traces what is about to run."""
        requests = admitted.requests
        answer = AnswerNote(
            response_id=admitted.response_id,
            model=self._served_model_name,
            is_stream=bool(wire.stream),
            params=requests[0].engine_request.sampling_params,
            requests=tuple(each.record for each in requests),
        )
        note_answer(request.scope, answer)
