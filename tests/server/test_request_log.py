import logging

import pytest

from engine_core import FinishReason
from server.records import RequestRecord
from server.request_log import format_request, log_request_end


def test_a_line_tells_what_a_request_was_and_how_long_it_took(caplog: pytest.LogCaptureFixture) -> None:
    record = RequestRecord(
        request_id="cmpl-1",
        arrival_time=100.0,
        num_prompt_tokens=12,
        num_cached_tokens=8,
        num_output_tokens=5,
        first_scheduled_time=100.0031,
        first_token_time=100.052,
        last_token_time=100.2,
        end_time=100.3,
        finish_reason=FinishReason.STOP,
    )
    with caplog.at_level(logging.INFO, logger="server.requests"):
        log_request_end(record)
    assert [each.getMessage() for each in caplog.records] == [
        "cmpl-1 stop: 12 prompt tokens (8 cached), 5 output tokens; queue 0.003 s, first token 0.052 s, total 0.300 s"
    ]


def test_what_a_request_did_not_come_to_is_a_dash() -> None:
    record = RequestRecord("r", 100.0, 12, end_time=100.5, finish_reason=FinishReason.ABORT)
    assert format_request(record) == (
        "r abort: 12 prompt tokens (0 cached), 0 output tokens; queue -, first token -, total 0.500 s"
    )


def test_logging_never_raises_into_serving(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="server.requests"):
        log_request_end(RequestRecord("r", 100.0, 12, end_time="soon"))  # type: ignore[arg-type]
    assert [each.getMessage() for each in caplog.records] == ["request r has ended, but not in words"]
