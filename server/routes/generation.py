"""What the generating endpoints share: from an admitted request to a response, streamed or whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from fastapi import Request, Response
from pydantic import BaseModel

from server.admission import Admission, Admitted
from server.engine_client import EngineClient
from server.json_text import encode_json
from server.protocol import GenerationFields
from server.replies import ReplyHead, ReplyShape
from server.request_reader import RequestReader
from server.streaming import EventStream, StreamTiming, build_events, collect_choices, run_while_connected


class ShapeFactory(Protocol):
    """CompletionShape or ChatShape."""

    def __call__(self, head: ReplyHead, *, has_usage: bool = False) -> ReplyShape: ...


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
    ) -> None:
        self.reader = reader
        self.admission = admission
        self._engine_client = engine_client
        self._served_model_name = served_model_name
        self._system_fingerprint = system_fingerprint
        self._timing = timing
        self._unix_time = unix_time

    async def answer(
        self, request: Request, wire: GenerationFields, admitted: Admitted, create_shape: ShapeFactory
    ) -> Response:
        """Run an admitted request and return its response.

        Raises:
            RequestError: It failed before anything was sent.
            ClientGoneError: The client left.
            EngineDeadError: The engine died.
        """
        head = ReplyHead(
            admitted.response_id, int(self._unix_time()), self._served_model_name, self._system_fingerprint
        )
        if wire.stream:
            has_usage = wire.has_stream_usage
            shape = create_shape(head, has_usage=has_usage)
            events = build_events(self._engine_client, admitted.requests, shape, has_usage=has_usage)
            return EventStream(events, timing=self._timing)
        choices = await run_while_connected(request.receive, collect_choices(self._engine_client, admitted.requests))
        return Response(encode_json(create_shape(head).build_reply(choices)), media_type="application/json")

    @staticmethod
    def describe_body(wire_type: type[BaseModel]) -> dict[str, Any]:
        """Return the OpenAPI part for a body that the endpoint reads itself."""
        schema = {"$ref": f"#/components/schemas/{wire_type.__name__}"}
        return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}
