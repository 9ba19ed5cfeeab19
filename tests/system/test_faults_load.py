"""Too much for the KV cache, for minutes; and a thousand clients who leave. Afterwards nothing is held or missing."""

from __future__ import annotations

import json
import random
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import httpx

from tests.e2e.raw_http import build_request
from tests.e2e.server_process import ServerProcess
from tests.system.clients import COMPLETIONS, ask, open_stream, read_stream, resident_kib, wait_until_quiet

_STORIES = [f"Story number {i}. There was once a {'very ' * (i * 7 % 40)}old house." for i in range(48)]
_MAX_DISCONNECT_GROWTH_KIB = 48 * 1024


def answer_all(url: str, num_at_once: int) -> list[str]:
    def answer(story: str) -> str:
        seen = read_stream(url, ask(320, prompt=story))
        assert seen.is_done and seen.finish_reason == "length" and not seen.broken, seen
        return seen.text

    with ThreadPoolExecutor(num_at_once) as pool:
        return list(pool.map(answer, _STORIES))


def test_a_kv_cache_that_is_exhausted_for_minutes_delays_answers_and_changes_none() -> None:
    with ServerProcess("--num-kv-blocks", "512", "--max-num-seqs", "16") as roomy:
        expected = answer_all(roomy.url, 8)
    # 16 blocks of 64 tokens: three stories at a time have room to their end, sixteen are let in.
    with ServerProcess("--num-kv-blocks", "16", "--max-num-seqs", "16", "--watermark", "0") as tight:
        started = time.monotonic()
        while time.monotonic() - started < 120:
            assert answer_all(tight.url, 48) == expected
        assert tight.metric("vllm:num_preemptions_total") > 20, "the cache was exhausted"
        assert tight.metric("pointsman:num_stalls_total") == 0
        wait_until_quiet(tight)
        assert httpx.get(tight.url + "/ready").status_code == 200
    assert tight.process.returncode == 0


def leave(server: ServerProcess, seed: int) -> None:
    """Ask for something, and go at some moment, in some way."""
    rng = random.Random(seed)
    body = ask(
        rng.choice((4, 40, 400)),
        prompt=f"Count {seed % 20}: " + "and " * rng.randrange(60),
        stream=rng.random() < 0.7,
        n=rng.choice((1, 1, 1, 3)),
        temperature=rng.choice((0, 1.0)),
    )
    if rng.random() < 0.1:
        with socket.create_connection(("127.0.0.1", server.port), timeout=60) as sock:
            wire = build_request(COMPLETIONS, json.dumps(body).encode())
            sock.sendall(wire[: rng.randrange(len(wire))])
        return
    with open_stream(server, body) as sock:
        if rng.random() < 0.5:
            time.sleep(rng.uniform(0, 0.5))
        else:
            sock.settimeout(rng.uniform(0.2, 2))
            with suppress(TimeoutError):  # it has waited long enough
                sock.recv(rng.choice((1, 200, 4000)))
        if rng.random() < 0.5:  # a reset instead of a goodbye
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_a_thousand_disconnects_leave_nothing_behind() -> None:
    with ServerProcess("--num-kv-blocks", "128", "--max-num-seqs", "16") as server:
        expected = read_stream(server.url, ask(24)).text
        memory = []
        for half in range(2):
            with ThreadPoolExecutor(24) as pool:
                list(pool.map(lambda number: leave(server, number), range(half * 500, half * 500 + 500)))
            wait_until_quiet(server, 120)
            memory.append(resident_kib(server.process.pid))
        assert server.metric("vllm:num_requests_running") == server.metric("vllm:kv_cache_usage_perc") == 0
        assert server.metric("vllm:request_success_total") == server.metric("vllm:e2e_request_latency_seconds_count")
        assert memory[1] - memory[0] < _MAX_DISCONNECT_GROWTH_KIB, memory
        assert read_stream(server.url, ask(24)).text == expected
        assert " ERROR " not in server.output, server.output
    assert server.process.returncode == 0
