from __future__ import annotations

import json
import logging

import pytest

from server.field_names import MAX_CHARS
from tests.server.fake_engine_client import FakeEngineClient
from tests.server.http_helpers import FakeMetrics, build_app, connect


@pytest.mark.parametrize(
    ("name", "logged"),
    [
        ("temprature", "temprature"),
        ("a\r2026-01-01 ERROR forged\n", "a?2026-01-01?ERROR?forged?"),
        ("\x1b[31m\u2028\x85", "?[31m??"),
        ("模型\ud800", "???"),
        ("x" * 1000, "x" * MAX_CHARS),
    ],
)
async def test_an_unknown_fields_name_is_logged_once_in_plain_letters(
    name: str, logged: str, caplog: pytest.LogCaptureFixture
) -> None:
    metrics = FakeMetrics()
    async with connect(build_app(FakeEngineClient(), metrics=metrics)) as client:
        for _ in range(2):
            body = json.dumps({"prompt": "a", name: 1})  # httpx's own has no lone surrogates
            response = await client.post("/v1/completions", content=body, headers={"Content-Type": "application/json"})
            assert response.status_code == 200
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert told == [f"requests carry a field that is not known and is ignored: {logged}"]
    assert len(metrics.unknown) == 2
