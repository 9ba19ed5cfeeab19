"""The log and the traces of a real server: every line is JSON, each request has one, and two spans tell the same."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.log_lines import read_lines, read_request_lines, wait_for_request_line
from tests.e2e.server_process import ServerProcess
from tests.server.otlp_receiver import OtlpReceiver, ReceivedSpan

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MODEL = "SmolLM2-135M-Instruct"
TRACE = "0af7651916cd43dd8448eb211c80319c"
ASK = {"prompt": "The capital of France is", "max_tokens": 12, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as collector:
        yield collector


@pytest.fixture(scope="module")
def server(embedded_model: Path, receiver: OtlpReceiver) -> Iterator[ServerProcess]:
    flags = ("--num-kv-blocks", "64", "--max-num-seqs", "8", "--max-model-len", "512")
    with ServerProcess(*flags, "--otlp-traces-endpoint", receiver.url) as process:
        yield process


def post(server: ServerProcess, label: str, path: str = COMPLETIONS, **fields: Any) -> httpx.Response:
    headers = {"X-Request-Id": label, "traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    return httpx.post(server.url + path, json={**ASK, **fields}, headers=headers, timeout=60)


def check_times(line: dict[str, Any]) -> None:
    assert 0 <= line["queue_s"] <= line["ttft_s"] <= line["e2e_s"] < 60
    assert 0 < line["itl_p50_s"] < line["e2e_s"]


def test_a_whole_answer(server: ServerProcess) -> None:
    reply = post(server, "whole")
    answer, line = reply.json(), wait_for_request_line(server, "whole")
    assert (line["request_id"], line["model"], line["trace_id"]) == (answer["id"], MODEL, TRACE)
    assert (line["method"], line["path"], line["status"], line["stream"]) == ("POST", COMPLETIONS, 200, False)
    assert (line["input_tokens"], line["output_tokens"]) == (5, 12)
    assert (line["n"], line["finish_reason"], line["client_disconnected"]) == (1, "length", False)
    assert (line["error_code"], line["key_id"], line["preemptions"], line["level"]) == (None, None, 0, "info")
    assert reply.headers["x-request-id"] == "whole"
    check_times(line)


def test_a_stream(server: ServerProcess) -> None:
    messages = [{"role": "user", "content": "Count to ten."}]
    text = post(server, "stream", CHAT, messages=messages, stream=True, stream_options={"include_usage": True}).text
    *_, usage = [
        json.loads(event.removeprefix("data: ")) for event in text.split("\n\n") if event.startswith("data: {")
    ]
    line = wait_for_request_line(server, "stream")
    assert (line["request_id"], line["path"], line["stream"]) == (usage["id"], CHAT, True)
    assert line["input_tokens"] == usage["usage"]["prompt_tokens"]
    assert line["output_tokens"] == usage["usage"]["completion_tokens"] == 12
    check_times(line)


def test_several_choices_are_one_line_that_adds_them_up(server: ServerProcess) -> None:
    usage = post(server, "choices", n=2, temperature=1).json()["usage"]
    line = wait_for_request_line(server, "choices")
    assert (line["n"], line["input_tokens"], line["output_tokens"]) == (2, 5, 24)
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (5, 24)
    check_times(line)


@pytest.mark.parametrize(
    ("label", "fields", "status", "code", "param"),
    [
        ("too-long", {"prompt": "word " * 600}, 400, "context_length_exceeded", "prompt"),
        ("bad-value", {"temperature": 9}, 400, "invalid_value", "temperature"),
        ("other-model", {"model": 'x"\n{"level":"error"}\x1b[31m'}, 404, "model_not_found", "model"),
    ],
)
def test_what_is_refused_has_a_line_too(
    server: ServerProcess, label: str, fields: dict[str, Any], status: int, code: str, param: str | None
) -> None:
    reply = post(server, label, **fields)
    line = wait_for_request_line(server, label)
    assert (reply.status_code, line["status"]) == (status, status)
    assert (line["error_code"], line["error_param"]) == (code, param)
    assert (line["request_id"], line["model"], line["n"], line["output_tokens"]) == (None, None, None, 0)
    assert line["trace_id"] == TRACE and line["e2e_s"] > 0


def test_a_client_that_leaves_is_seen_to(server: ServerProcess) -> None:
    body = {**ASK, "max_tokens": 450, "stream": True}
    with httpx.stream("POST", server.url + COMPLETIONS, json=body, headers={"X-Request-Id": "left"}) as reply:
        next(reply.iter_lines())
    line = wait_for_request_line(server, "left")
    assert (line["status"], line["finish_reason"], line["client_disconnected"]) == (200, "abort", True)
    assert 0 < line["output_tokens"] < 450


def test_every_line_is_json_and_the_first_names_the_configuration(server: ServerProcess) -> None:
    first, *others = read_lines(server)
    assert first["logger"] == "server.cli" and re.fullmatch(r"[0-9a-f]{12}", first["config_hash"])
    assert any(line["logger"] == "server.startup" and "Memory" in line["message"] for line in others)
    assert all({"ts", "level", "logger", "message"} <= set(line) for line in others)


def test_probes_and_metrics_have_no_line(server: ServerProcess) -> None:
    num_before = len(read_request_lines(server))
    for path in ("/health", "/ready", "/metrics", "/v1/models"):
        httpx.get(server.url + path)
    post(server, "after-probes")
    wait_for_request_line(server, "after-probes")
    assert len(read_request_lines(server)) == num_before + 1


def test_the_spans_of_a_request_tell_what_its_line_tells(server: ServerProcess, receiver: OtlpReceiver) -> None:
    body = {"messages": [{"role": "user", "content": "A secret word."}], "max_tokens": 12, "stream": True}
    begun_ns = time.time_ns()
    httpx.post(server.url + CHAT, json=body, headers={"X-Request-Id": "traced"}, timeout=60)
    line = wait_for_request_line(server, "traced")

    def find() -> list[ReceivedSpan]:
        return sorted(
            (each for each in receiver.spans if each.ids[0] == line["trace_id"]), key=lambda each: each.ids[2]
        )

    server.wait_until(lambda: len(find()) == 2, 15)
    http, model = find()
    assert (http.span.name, model.span.name) == (f"POST {CHAT}", f"chat {MODEL}")
    assert (http.ids[2], model.ids[2]) == ("", http.ids[1]), "a trace of its own, one span inside the other"
    assert http.attributes["http.request.header.x-request-id"] == ["traced"]
    assert model.attributes["gen_ai.response.id"] == line["request_id"]
    assert model.attributes["gen_ai.usage.output_tokens"] == line["output_tokens"]
    assert model.attributes["gen_ai.latency.time_to_first_token"] == pytest.approx(line["ttft_s"], abs=1e-5)
    events = [(event.name, event.time_unix_nano) for event in model.span.events]
    assert [name for name, _ in events] == ["queued", "scheduled", "first_token", "finished"]
    times = [
        begun_ns,
        http.span.start_time_unix_nano,
        *(time_ns for _, time_ns in events),
        http.span.end_time_unix_nano,
    ]
    assert times == sorted(times) and times[-1] <= time.time_ns()
    assert "secret" not in str(http.span) + str(model.span)
