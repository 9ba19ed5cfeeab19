from __future__ import annotations

import json
from typing import Any

import pytest

from server.batch.lines import BatchLineError, build_answer, build_refusal, parse_line
from tests.server.batch_files import CHAT, COMPLETIONS, build_line


@pytest.mark.parametrize("url", [CHAT, COMPLETIONS])
def test_a_line_names_itself_its_target_and_its_request(url: str) -> None:
    line = build_line("é", url=url)
    item = parse_line(json.dumps(line).encode())
    assert (item.custom_id, item.url, json.loads(item.body)) == ("é", url, line["body"])


@pytest.mark.parametrize(
    ("line", "code", "complaint"),
    [
        (b"{", "invalid_json", "The line is not valid JSON"),
        (b"[]", "invalid_line", "JSON object with custom_id"),
        ({**build_line("x"), "custom_id": ""}, "invalid_line", "`custom_id` must be a string"),
        ({**build_line("x"), "method": "GET"}, "invalid_method", '`method` must be "POST"'),
        ({**build_line("x"), "url": "/v1/embeddings"}, "invalid_url", "not '/v1/embeddings'"),
        ({**build_line("x"), "body": None}, "invalid_body", "`body` must be an object"),
        (
            b'{"custom_id":"x","method":"POST","url":"/v1/completions","body":{"seed":1e999}}',
            "invalid_body",
            "too large",
        ),
        (build_line("x", stream=True), "stream_not_supported", "leave `stream` out"),
    ],
)
def test_what_is_wrong_with_a_line_is_a_code_and_a_sentence(line: Any, code: str, complaint: str) -> None:
    with pytest.raises(BatchLineError) as caught:
        parse_line(line if isinstance(line, bytes) else json.dumps(line).encode())
    assert caught.value.code == code
    assert complaint in caught.value.message


def test_an_answer_and_a_refusal_have_openais_keys_and_no_line_end() -> None:
    answer = build_answer("batch_req_1", "a", status=200, request_id="r", body={"text": "two\nlines"})
    refusal = build_refusal("batch_req_2", 7, BatchLineError("invalid_body", "Change it.", "b"))
    assert b"\n" not in answer + refusal
    assert json.loads(answer) == {
        "id": "batch_req_1",
        "custom_id": "a",
        "response": {"status_code": 200, "request_id": "r", "body": {"text": "two\nlines"}},
        "error": None,
    }
    assert json.loads(refusal) == {
        "id": "batch_req_2",
        "custom_id": "b",
        "response": None,
        "error": {"code": "invalid_body", "message": "Change it.", "line": 7},
    }
