"""An OTLP/HTTP collector in this process: takes what is posted to it and reads it as a collector does."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)


@dataclass(frozen=True)
class ReceivedSpan:
    """A span, its ids in hexadecimal digits and its attributes by name.

    Attributes:
        resource: What is said of its service.
        span: All else, as it came.
        attributes: Its own.
    """

    resource: dict[str, Any]
    span: Any
    attributes: dict[str, Any]

    @property
    def ids(self) -> tuple[str, str, str]:
        """Of its trace, of itself, of its parent."""
        return self.span.trace_id.hex(), self.span.span_id.hex(), self.span.parent_span_id.hex()


class OtlpReceiver:
    """Listens on a free port of loopback while it is entered.

    Attributes:
        spans: What has come.
        paths: Where it was posted to.
        is_down: Answers 503.
    """

    def __init__(self) -> None:
        self.spans: list[ReceivedSpan] = []
        self.paths: list[str] = []
        self.is_down = False
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(503 if receiver.is_down else 200)
                self.end_headers()
                if not receiver.is_down:
                    receiver.paths.append(self.path)
                    receiver.spans += read_spans(body)
                    self.wfile.write(ExportTraceServiceResponse().SerializeToString())

            def log_message(self, format: str, *args: Any) -> None:
                """Keep quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> OtlpReceiver:
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def read_spans(body: bytes) -> list[ReceivedSpan]:
    """The spans of one message of OTLP."""
    message = ExportTraceServiceRequest.FromString(body)
    return [
        ReceivedSpan(read_attributes(group.resource.attributes), span, read_attributes(span.attributes))
        for group in message.resource_spans
        for scope in group.scope_spans
        for span in scope.spans
    ]


def read_attributes(pairs: Any) -> dict[str, Any]:
    """Attributes by name, as values of Python's own."""
    return {pair.key: _read_value(pair.value) for pair in pairs}


def _read_value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_read_value(each) for each in value.array_value.values]
    return getattr(value, kind)
