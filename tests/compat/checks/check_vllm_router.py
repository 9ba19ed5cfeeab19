"""Two servers behind vllm-router: `check_vllm_router.py URL SECOND_URL SECOND_PID`. Kills the second at the end."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from checking import (
    check,
    count_aborts,
    equal,
    fetch,
    fetch_json,
    holds,
    metric,
    model_name,
    run_checks,
    wait_until,
    wait_until_idle,
)

FIRST, SECOND, SECOND_PID = sys.argv[1], sys.argv[2], int(sys.argv[3])
SERVERS = (FIRST, SECOND)
MODEL = model_name(FIRST)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


PORT, METRICS_PORT = free_port(), free_port()
ROUTER = f"http://127.0.0.1:{PORT}"
ROUTER_METRICS = f"http://127.0.0.1:{METRICS_PORT}"


@contextlib.contextmanager
def running_router() -> Iterator[None]:
    """The router over both servers, from its first ready answer on."""
    command = [str(Path(sys.executable).with_name("vllm-router")), "--host", "127.0.0.1", "--port", str(PORT)]
    command += ["--worker-urls", *SERVERS, "--policy", "round_robin", "--prometheus-port", str(METRICS_PORT)]
    command += ["--health-check-interval-secs", "2", "--worker-startup-check-interval", "1"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            wait_until(_is_ready, "the router's /readiness")
            yield
        finally:
            process.kill()
            process.wait()


def _is_ready() -> bool:
    try:
        return fetch(f"{ROUTER}/readiness")[0] == 200
    except OSError:
        return False


def complete(prompt: str, **fields: Any) -> tuple[int, Any]:
    """Ask through the router; return status and decoded body."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
    status, answer = fetch(f"{ROUTER}/v1/completions", body)
    return status, json.loads(answer)


def count_ended(url: str) -> float:
    return metric(url, "vllm:request_success_total")


def count_attempts() -> float:
    """Return how often the router has picked a server: more often than it was asked where it tries again."""
    return metric(ROUTER_METRICS, "vllm_router_policy_decisions_total")


def count_seen() -> float:
    """Return how many requests for completions have reached the servers, whatever became of them."""
    return sum(metric(url, "http_requests_total", 'handler="/v1/completions"') for url in SERVERS)


@check
def both_servers_answer_in_turn() -> None:
    before = [count_ended(url) for url in SERVERS]
    for number in range(6):
        equal(complete(f"Number {number} is")[0], 200)
    equal([count_ended(url) - old for url, old in zip(SERVERS, before, strict=True)], [3, 3])


@check
def answers_are_those_of_a_server() -> None:
    messages = [{"role": "user", "content": "Count from one to one hundred."}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0}
    answers = [fetch_json(f"{url}/v1/chat/completions", body) for url in (ROUTER, ROUTER, FIRST)]
    equal(len({answer["choices"][0]["message"]["content"] for answer in answers}), 1)
    equal(answers[0]["usage"]["completion_tokens"], 8)
    equal(fetch_json(f"{ROUTER}/v1/models")["data"][0]["id"], MODEL)


@check
def fields_pass_through_the_router() -> None:
    status, answer = complete("The capital of France is", n=2, temperature=1, seed=3, logprobs=1)
    equal((status, [choice["index"] for choice in answer["choices"]]), (200, [0, 1]))
    equal({len(choice["logprobs"]["tokens"]) for choice in answer["choices"]}, {4})


@check
def what_the_router_adds_is_known() -> None:
    # It types every body anew and adds its own fields: each worth a warning in the log if the server knew it not.
    complete("Hi")
    for url in SERVERS:
        holds('field="no_stop_trim"' not in fetch(f"{url}/metrics")[1].decode(), "no_stop_trim is unknown")
        holds('field="return_hidden_states"' not in fetch(f"{url}/metrics")[1].decode(), "return_hidden_states too")


@check
def a_stream_comes_as_a_stream() -> None:
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    _, answer = fetch(f"{ROUTER}/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    events = [line.removeprefix("data: ") for line in answer.decode().splitlines() if line.startswith("data: ")]
    equal(events.pop(), "[DONE]")
    *chunks, last = map(json.loads, events)
    text = fetch_json(f"{FIRST}/v1/completions", body)["choices"][0]["text"]
    equal("".join(chunk["choices"][0]["text"] for chunk in chunks), text)
    equal((last["choices"], last["usage"]["completion_tokens"]), ([], 8))


@check
def who_leaves_mid_stream_frees_the_request_on_the_server() -> None:
    before = sum(map(count_aborts, SERVERS))
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
    body = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    holds(answer.readline().startswith(b"data: "))
    equal(sum(metric(url, "vllm:num_requests_running") for url in SERVERS), 1)
    connection.close()
    answer.close()
    for url in SERVERS:
        wait_until_idle(url)
    equal(sum(map(count_aborts, SERVERS)), before + 1)


@check
def errors_come_unchanged_and_are_not_tried_again() -> None:
    wrong: list[tuple[int, dict[str, Any]]] = [
        (404, {"model": "no-such-model"}),
        (400, {"temperature": 3.5}),
        (400, {"prompt": "word " * 5000}),
        (400, {"prompt": [10**9]}),
        (400, {"n": 0}),
    ]
    for status, fields in wrong:
        check_refusal(status, {"model": MODEL, "prompt": "Hi", "max_tokens": 4, **fields})


def check_refusal(status: int, body: dict[str, Any]) -> None:
    attempts, seen = count_attempts(), count_seen()
    answer = fetch(f"{ROUTER}/v1/completions", body)
    equal(count_attempts(), attempts + 1)
    # A server counts a request when its answer has left, a moment after the client has it.
    wait_until(lambda: count_seen() > seen, "a server counts the request")
    equal(count_seen(), seen + 1)
    equal(answer[0], status)
    equal(json.loads(answer[1]), json.loads(fetch(f"{FIRST}/v1/completions", body)[1]))


@check
def concurrent_streams_all_end() -> None:
    ends: list[bytes] = []

    def ask(number: int) -> None:
        body = {"model": MODEL, "prompt": f"Number {number} is", "max_tokens": 8, "stream": True}
        ends.append(fetch(f"{ROUTER}/v1/completions", body)[1].rstrip()[-12:])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    equal(ends, [b"data: [DONE]"] * 16)
    for url in SERVERS:
        wait_until_idle(url)


@check
def a_killed_server_costs_nobody_an_answer() -> None:
    attempts, ended = count_attempts(), count_ended(FIRST)
    os.kill(SECOND_PID, signal.SIGKILL)
    for number in range(8):
        equal(complete(f"Number {number} is")[0], 200)
    equal(count_ended(FIRST), ended + 8)
    # Here it does try again, which is what the count of attempts is good for.
    holds(count_attempts() > attempts + 8, count_attempts() - attempts)


if __name__ == "__main__":
    print(f"router {ROUTER} over {SERVERS}")
    with running_router():
        run_checks()
