"""Tracer: who records the spans of a request, if anybody. The one there is needs packages that only an extra brings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from engine_core import ConfigError
from server.logs.http_record import HttpRecord

_MISSING = (
    "--otlp-traces-endpoint needs OpenTelemetry, which is not installed: run `pip install 'pointsman[otel]'`, or "
    "leave the flag out"
)


class Tracer(Protocol):
    """Records requests that have ended."""

    def record(self, record: HttpRecord) -> str:
        """Record a request's spans and return their trace's id, 32 hexadecimal digits. Must not wait for anybody."""

    def close(self) -> None:
        """Send what has not been sent, and stop. Takes a bounded time."""


class TracerFactory(Protocol):
    """OtelTracer, which cannot be named here."""

    def __call__(self, *, endpoint: str, version: str) -> Tracer: ...


def load_tracing() -> TracerFactory:
    """Return what makes a tracer.

    Raises:
        ConfigError: The packages that it needs are not there.
    """
    try:
        from server.logs.otel_tracer import OtelTracer
    except ImportError:
        raise ConfigError(_MISSING) from None
    return OtelTracer


@contextmanager
def open_tracer(endpoint: str | None, version: str) -> Iterator[Tracer | None]:
    """Yield the tracer that sends to an endpoint, closed at the end; None where there is no endpoint.

    Args:
        endpoint: Of an OTLP/HTTP receiver.
        version: Of Pointsman.

    Raises:
        ConfigError: As load_tracing.
    """
    if endpoint is None:
        yield None
        return
    tracer = load_tracing()(endpoint=endpoint, version=version)
    try:
        yield tracer
    finally:
        tracer.close()
