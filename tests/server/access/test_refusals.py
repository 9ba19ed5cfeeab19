from __future__ import annotations

import logging

import pytest

from server.access.refusals import AccessRefusals, Refusal
from server.metrics_table import TABLE
from tests.server.http_helpers import FakeMetrics


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_each_is_counted_and_the_log_gets_one_line_in_ten_seconds(caplog: pytest.LogCaptureFixture) -> None:
    metrics, clock = FakeMetrics(), Clock()
    refusals = AccessRefusals(metrics, clock)
    scope = {"type": "http", "client": ("10.0.0.9", 4711), "path": "/secret\nFAKE", "headers": [(b"x", b"sk-secret")]}
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            refusals.note(Refusal.UNKNOWN_KEY, scope)
        refusals.note(Refusal.NO_KEY, scope)
        clock.now += 10.0
        refusals.note(Refusal.UNKNOWN_KEY, {**scope, "client": None})
    assert metrics.refused == ["unknown_key"] * 1000 + ["no_key", "unknown_key"]
    assert [record.getMessage() for record in caplog.records] == [
        "requests refused: 1 with an unknown key; the last from 10.0.0.9",
        "requests refused: 1000 with an unknown key, 1 without a key; the last from an unknown address",
    ]


def test_every_reason_has_its_series_from_the_start() -> None:
    (row,) = (row for row in TABLE if row.name == "pointsman:access_refusals_total")
    assert set(row.values) == {refusal.value for refusal in Refusal}
