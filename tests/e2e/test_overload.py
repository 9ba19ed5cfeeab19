"""Too many clients at once, on a real server: who is refused hears it quickly, who is admitted is answered."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.server_process import ServerProcess

NUM_CLIENTS = 64
IDLE = ("pointsman:num_permits", "pointsman:num_requests_queued", "pointsman:num_tokens_queued",
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")  # fmt: skip


@pytest.fixture(scope="module")
def server(embedded_model: Path) -> Iterator[ServerProcess]:
    with ServerProcess("--num-kv-blocks", "64", "--max-num-seqs", "2", "--max-queued-requests", "4") as process:
        yield process


async def ask(client: httpx.AsyncClient, number: int, max_tokens: int = 24) -> tuple[httpx.Response, float]:
    body = {"prompt": f"{number}: Once upon a time", "max_tokens": max_tokens, "ignore_eos": True}
    started = time.perf_counter()
    response = await client.post("/v1/completions", json=body)
    return response, time.perf_counter() - started


async def test_64_clients_at_a_cap_of_4_are_refused_quickly_or_served(server: ServerProcess) -> None:
    limits = httpx.Limits(max_connections=NUM_CLIENTS)
    async with httpx.AsyncClient(base_url=server.url, timeout=120, limits=limits) as client:
        answers = await asyncio.gather(*(ask(client, number) for number in range(NUM_CLIENTS)))
        served = [response for response, _ in answers if response.status_code == 200]
        refused = [(response, seconds) for response, seconds in answers if response.status_code == 503]
        assert len(served) + len(refused) == NUM_CLIENTS
        assert len(served) >= 6, "two seats, and four who wait"
        assert len(refused) > NUM_CLIENTS // 2
        for response in served:
            assert response.json()["usage"]["completion_tokens"] == 24
        for response, seconds in refused:
            assert response.json()["error"]["code"] == "queue_full"
            assert 1 <= int(response.headers["retry-after"]) <= 60
            assert seconds < 5
        assert server.metric("vllm:admission_rejections_total") == len(refused)
        server.wait_until(lambda: all(server.metric(name) == 0 for name in IDLE), 10)
        assert (await ask(client, 0))[0].status_code == 200


async def test_caps_and_cache_change_while_it_serves_and_a_stream_is_ended_by_id(server: ServerProcess) -> None:
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
        before = (await client.get("/admin/limits")).json()
        assert (before["max_num_seqs"], before["max_queued_requests"]) == (2, 4)
        after = (await client.post("/admin/limits", json={"max_num_seqs": 1, "max_queued_requests": 1})).json()
        assert after == {**before, "max_num_seqs": 1, "max_queued_requests": 1}
        refused = await client.post("/admin/limits", json={"max_num_seqs": 3})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_num_seqs")
        body = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body, headers={"X-Request-Id": "mine"}) as stream:
            lines = stream.aiter_lines()
            assert (await anext(lines)).startswith("data: ")
            assert (await client.post("/reset_prefix_cache")).json() == {"success": False}
            assert (await client.post("/abort", json={"request_ids": ["mine"]})).json()["num_aborted"] == 1
            rest = [line async for line in lines if line]
        assert '"code":"request_cancelled"' in rest[-2] and rest[-1] == "data: [DONE]"
        server.wait_until(lambda: server.metric("vllm:num_requests_running") == 0, 10)
        assert (await client.post("/reset_prefix_cache")).json() == {"success": True}
        await client.post("/admin/limits", json={"max_num_seqs": 2, "max_queued_requests": 4})


async def test_a_refused_request_leaves_its_connection_fit_for_the_next(server: ServerProcess) -> None:
    """Its body is not read before it is refused; whatever is still on its way must not be taken for a request."""
    async with httpx.AsyncClient(base_url=server.url, timeout=60) as busy:
        await busy.post("/admin/limits", json={"max_num_seqs": 1, "max_queued_requests": 1})
        body = {"prompt": "Once", "max_tokens": 2000, "ignore_eos": True, "stream": True}
        names = ("runs", "waits")
        taken = [
            asyncio.create_task(busy.post("/v1/completions", json=body, headers={"X-Request-Id": name}))
            for name in names
        ]
        await asyncio.to_thread(server.wait_until, lambda: server.metric("vllm:num_requests_waiting") == 1, 30)
        async with httpx.AsyncClient(base_url=server.url, timeout=60, limits=httpx.Limits(max_connections=1)) as one:
            for _ in range(3):
                response = await one.post("/v1/completions", json={"prompt": "x" * 4_000_000})
                assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_full")
                assert (await one.get("/version")).status_code == 200
        assert (await busy.post("/abort", json={"request_ids": names})).json() == {"num_aborted": 2, "not_found": []}
        running, waiting = await asyncio.gather(*taken)
        assert running.text.endswith("data: [DONE]\n\n") and "request_cancelled" in running.text
        assert "request_cancelled" in waiting.text
