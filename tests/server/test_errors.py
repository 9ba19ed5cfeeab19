from __future__ import annotations

import json
import logging

import pytest
from starlette.exceptions import HTTPException

from engine_core import EngineDeadError
from server.errors import (
    ERROR_TABLE,
    ErrorKind,
    RequestError,
    ServerStoppingError,
    as_request_error,
    build_error_body,
    build_error_response,
)


@pytest.mark.parametrize("kind", ErrorKind)
def test_every_kind_has_a_reply_of_openais_shape(kind: ErrorKind) -> None:
    body = build_error_body(RequestError("Do this.", kind=kind, param="p"))
    assert body == {
        "error": {"message": "Do this.", "type": ERROR_TABLE[kind].type, "param": "p", "code": ERROR_TABLE[kind].code}
    }
    assert 400 <= ERROR_TABLE[kind].status < 600
    expected = {429: "rate_limit_error"}.get(ERROR_TABLE[kind].status, "invalid_request_error")
    assert (ERROR_TABLE[kind].type == expected) == (ERROR_TABLE[kind].status < 500)


def test_what_should_be_tried_again_says_when() -> None:
    response = build_error_response(RequestError("Later.", kind=ErrorKind.NOT_READY))
    assert (response.status_code, response.headers["retry-after"]) == (503, "2")


def test_an_error_may_know_better_than_its_row_when_to_come_back() -> None:
    error = RequestError("Later.", kind=ErrorKind.QUEUE_FULL, retry_after_s=17)
    assert build_error_response(error).headers["retry-after"] == "17"
    assert RequestError("Later.", kind=ErrorKind.QUEUE_FULL).retry_after_s == 1
    assert RequestError("No.", kind=ErrorKind.INVALID_VALUE).retry_after_s is None


@pytest.mark.parametrize("kind", [ErrorKind.QUEUE_FULL, ErrorKind.QUEUE_TIMEOUT, ErrorKind.RATE_LIMITED])
def test_whoever_is_turned_away_for_load_is_told_when_to_come_back(kind: ErrorKind) -> None:
    assert ERROR_TABLE[kind].status in (429, 503)
    assert "retry-after" in build_error_response(RequestError("Later.", kind=kind)).headers


@pytest.mark.parametrize("kind", [ErrorKind.REQUEST_TIMEOUT, ErrorKind.CANCELLED])
def test_what_was_given_up_is_not_replayed_on_other_workers(kind: ErrorKind) -> None:
    assert ERROR_TABLE[kind].status not in (408, 429, 500, 502, 503, 504), "routers try those again"
    assert ERROR_TABLE[kind].status != 409 or ERROR_TABLE[kind].is_final, "OpenAI's clients try that again"


def test_a_surrogate_in_a_message_does_no_harm() -> None:
    response = build_error_response(RequestError("bad \ud800", kind=ErrorKind.INVALID_VALUE, param="\udfff"))
    assert json.loads(response.body)["error"]["message"] == "bad \ufffd"


def test_a_server_that_stops_says_so_and_asks_to_retry() -> None:
    error = as_request_error(ServerStoppingError("The server is shutting down; ask again."))
    assert (error.message, error.reply.status) == ("The server is shutting down; ask again.", 503)
    assert error.reply.retry_after_s == 1


def test_a_dead_engine_is_told_without_its_insides() -> None:
    error = as_request_error(EngineDeadError("CUDA error in /secret/path"))
    assert error.kind is ErrorKind.ENGINE_DEAD
    assert "secret" not in error.message


def test_an_unforeseen_error_is_logged_and_hidden(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        error = as_request_error(ZeroDivisionError("inside"))
    assert error.kind is ErrorKind.INTERNAL
    assert "inside" not in error.message
    assert caplog.records[0].exc_info is not None


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (404, ErrorKind.NOT_FOUND),
        (405, ErrorKind.METHOD_NOT_ALLOWED),
        (400, ErrorKind.INVALID_VALUE),
        (500, ErrorKind.INTERNAL),
    ],
)
def test_starlettes_own_errors_get_a_kind(status: int, kind: ErrorKind) -> None:
    assert as_request_error(HTTPException(status)).kind is kind


def test_what_trying_again_cannot_mend_says_so_to_openais_clients() -> None:
    response = build_error_response(RequestError("x", kind=ErrorKind.INTERNAL))
    assert response.headers["x-should-retry"] == "false"
    assert "x-should-retry" not in build_error_response(RequestError("x", kind=ErrorKind.NOT_READY)).headers
