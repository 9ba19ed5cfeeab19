from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from server.logs import tracing
from server.logs.http_record import HttpRecord
from server.logs.tracing import open_tracer

ROOT = Path(__file__).parents[3]


class FakeTracer:
    def __init__(self, **arguments: Any) -> None:
        self.arguments = arguments
        self.is_closed = False

    def record(self, record: HttpRecord) -> str:
        return ""

    def close(self) -> None:
        self.is_closed = True


def test_without_an_endpoint_nobody_traces() -> None:
    with open_tracer(None, "1") as tracer:
        assert tracer is None


def test_a_tracer_is_closed_whatever_happens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "load_tracing", lambda: FakeTracer)
    with pytest.raises(ZeroDivisionError), open_tracer("http://h/v1/traces", "1") as tracer:
        raise ZeroDivisionError
    assert isinstance(tracer, FakeTracer) and tracer.is_closed
    assert tracer.arguments == {"endpoint": "http://h/v1/traces", "version": "1"}


def test_without_the_extra_the_flag_is_refused_with_what_to_install() -> None:
    code = (
        "import sys; sys.modules['opentelemetry.sdk'] = None\n"
        "from server.cli import main\n"
        "sys.exit(main(['serve', '--otlp-traces-endpoint', 'http://localhost:4318']))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith("POINTSMAN_")}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 64
    assert result.stderr.startswith("pointsman: --otlp-traces-endpoint needs OpenTelemetry")
    assert "pip install 'pointsman[otel]'" in result.stderr and result.stderr.count("\n") == 1
