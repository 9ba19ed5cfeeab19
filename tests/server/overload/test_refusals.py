from __future__ import annotations

import pytest

from server.metrics_table import TABLE
from server.overload import refusals
from server.overload.refusals import Reason, Refusal

ALL = [
    refusals.build_queue_full(7, 4, 9),
    refusals.build_queue_tokens_full(7000, 4000, 9),
    refusals.build_queue_timeout(2.5, 9),
    refusals.build_request_timeout(3600.0),
    refusals.build_key_concurrency(4, 9),
    refusals.build_key_rate(60, 9),
]


@pytest.mark.parametrize("refusal", ALL, ids=lambda refusal: refusal.reason.value)
def test_each_says_in_a_sentence_what_to_change(refusal: Refusal) -> None:
    assert refusal.message[0].isupper() and refusal.message.endswith(".")
    assert any(word in refusal.message for word in ("ask", "send", "wait"))
    if refusal.reason is not Reason.REQUEST_TIMEOUT:
        assert refusal.retry_after_s == 9


def test_there_is_one_for_each_reason_and_a_series_too() -> None:
    assert {refusal.reason for refusal in ALL} == set(Reason)
    (row,) = [row for row in TABLE if row.name == "vllm:admission_rejections_total"]
    assert {reason.value for reason in Reason} <= set(row.values)
