"""What others' servers got wrong (field reports A, C to G), tried on the whole application over a real scheduler.

Here: A1 A2 A5 A7 A8 A10 A11 A14 A16 D7 D13 D18 E13 E17 E19 E20. On a real server, tests/e2e/test_field_reports_e2e.py:
A1 D13 D15 D16 E5 E22 E23 F4 F6 F7 F9 F10. All the rest:

A4          engine_core/scheduler: test_f_abort_in_every_state_ends_exactly_once, test_x4_u3_an_abort_in_flight_...
A13         test_routes_completions: test_headers_wait_for_the_first_token_and_then_pings_fill_the_silence; how long a
            client that left has waited is in the log's line of its request (test_request_log)
A17         what a reader leaves is merged, test_output_processor: test_what_was_not_taken_in_time_is_merged_into_...;
            and its connection cut, test_connection: test_a_client_that_does_not_read_..., e2e/test_lifecycle
C1 C6       e2e/test_lifecycle: test_a_stuck_step_..., test_sigterm_lets_a_stream_...; test_daemon, test_watchdog
C3 C4 C10   test_routes_ops: probes read the engine's heartbeat and no queue; C9 e2e/test_bad_input
C7          test_metrics: test_a_failing_metric_is_logged_once_and_costs_nothing_else; C12 as A13
D1          test_stop_strings, test_stream_equals_whole
D3 D4 D9 D10 D12 D21 D22  later, with tools and reasoning
D6          test_detokenizer: test_any_ids_at_all_give_the_whole_text; test_tokenizer: test_ids_beyond_...;
            test_output_processor: test_a_panic_in_one_requests_text_fails_it_alone
D19         test_routes_chat: test_many_streams_at_once_all_end; e2e/test_serve: test_32_streams_at_once_...
E4          engine_core/test_engine: test_ids_that_the_tokenizer_does_not_know_are_never_sampled
E1 E2       test_admission: test_every_field_that_holds_token_ids_is_held_to_the_vocabulary; e2e/test_bad_input
E7 E14      e2e/test_bad_input; test_app: test_no_body_brings_a_5xx, test_a_lone_surrogate_reaches_the_model_...
E8 E10 E11  later, with grammars
E16         test_protocol: test_unknown_fields_..., test_every_refused_..._field_takes_its_no_ops_and_nothing_else
E25         engine_core/model/test_sampling_oracle: test_draws_are_the_same_beside_others; e2e/test_sameness
F1 F3       later, with adapters; F4 and F10 as far as salts go: engine_core/kv_cache/test_block_hash too
B12 B20     test_overload_reports, with E23 by deadline and A16 by permits; test_routes_admin; e2e/test_overload
F9          of a caller's own salt; one drawn from its key comes later, with keys
G1 G2 G5 G7 G8 G10 G11  test_metrics_reports, test_metrics_contract, test_metrics; G4 later, with pause and sleep
"""

from __future__ import annotations

import asyncio
import gc
import random
import tracemalloc
from typing import Any

import pytest

from server.access.browser_guard import BrowserGuardMiddleware
from server.http.http_metrics import HttpMetricsMiddleware
from server.http.limits import BodyLimitMiddleware, LastCatchMiddleware, RequestLabelMiddleware
from server.lifecycle.drain import DrainMiddleware
from server.logs.http_log import HttpLogMiddleware
from server.overload.middleware import PermitMiddleware
from tests.server.fake_engine_client import FakeEngineClient
from tests.server.http_helpers import build_app, connect, get_chunks
from tests.server.metric_samples import read_samples
from tests.server.scheduled_app import CHAT, COMPLETIONS, Caller, ScheduledApp

PATHS = pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
STREAMS = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
MIDDLEWARE: list[Any] = [
    HttpMetricsMiddleware,
    HttpLogMiddleware,
    RequestLabelMiddleware,
    BrowserGuardMiddleware,
    DrainMiddleware,
    BodyLimitMiddleware,
    LastCatchMiddleware,
    PermitMiddleware,
]


async def depart(caller: Caller) -> None:
    """Leave, and let the server notice."""
    caller.leave()
    async with asyncio.timeout(5):
        await caller.task


def count_ends(app: ScheduledApp, reason: str) -> float:
    return read_samples(app.metrics)["vllm:request_success_total", f"finished_reason={reason}"]


# ---------------------------------------------------------------------- A: cancellation
@PATHS
@STREAMS
@pytest.mark.parametrize("n", [1, 3])
async def test_a1_a2_with_every_middleware_on_a_disconnect_ends_the_request_within_one_step(
    path: str, stream: bool, n: int
) -> None:
    app = ScheduledApp()
    assert [middleware.cls for middleware in app.app.user_middleware] == MIDDLEWARE
    caller = await app.ask(path, stream=stream, max_tokens=500, n=n)
    await app.step(3)
    assert not caller.task.done() and len(app.engine.scheduler.running) == n
    await depart(caller)
    await app.step()
    assert app.engine.is_empty and app.client.num_live == 0
    assert count_ends(app, "abort") == n
    samples = read_samples(app.metrics)
    assert samples["vllm:num_requests_running", ""] == samples["vllm:kv_cache_usage_perc", ""] == 0


@STREAMS
@pytest.mark.parametrize("is_queued", [False, True], ids=["running", "queued"])
async def test_a5_after_an_abort_the_same_request_id_is_served_again(stream: bool, is_queued: bool) -> None:
    app = ScheduledApp(max_num_seqs=1)
    name = {"x-request-id": "retry-me"}
    before = [await app.ask(max_tokens=6)] if is_queued else []
    caller = await app.ask(headers=name, stream=stream, max_tokens=50)
    await app.step(2)
    assert len(app.engine.scheduler.running) == 1
    await depart(caller)
    again = await app.ask(headers=name, stream=stream, max_tokens=2)
    await app.finish(*before, again)
    assert (again.status, again.headers["x-request-id"]) == (200, "retry-me")
    assert app.engine.is_empty


@PATHS
@STREAMS
async def test_a7_whenever_its_client_leaves_nothing_of_a_request_is_left(path: str, stream: bool) -> None:
    app = ScheduledApp(max_num_batched_tokens=8)
    for num_turns in range(60):
        caller = Caller(app.app, path, build_body(path, stream=stream, max_tokens=4, n=2, stop=["zz"]))
        # Each turn of the loop is another await that the leaving falls upon.
        for turn in range(num_turns):
            await asyncio.sleep(0)
            if turn % 5 == 4:
                app.engine.step()
        await depart(caller)
        await app.step()
        assert app.engine.is_empty and app.client.num_live == 0, num_turns
    ends = {reason: count_ends(app, reason) for reason in ("stop", "length", "abort", "error")}
    assert ends["abort"] > 0 and ends["error"] == 0
    assert sum(ends.values()) == read_samples(app.metrics)["vllm:e2e_request_latency_seconds_count", ""]


def build_body(path: str, **fields: Any) -> dict[str, Any]:
    what = {"prompt": "abcdefgh"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "abcdefgh"}]}
    return {**what, "ignore_eos": True, **fields}


@pytest.mark.parametrize("seed", range(3))
async def test_a8_a16_no_more_run_than_have_a_client_and_in_the_end_none(seed: int) -> None:
    rng = random.Random(seed)
    app = ScheduledApp(max_num_seqs=4, num_blocks=24)
    callers: list[Caller] = []
    for number in range(60):
        length = rng.randint(1, 20)
        callers.append(await app.ask(prompt="x" * length, max_tokens=rng.randint(1, 12), stream=rng.random() < 0.5))
        if rng.random() < 0.5:
            await depart(callers[rng.randrange(number + 1)])
        await app.step(rng.randrange(3))
        assert len(app.engine.scheduler.running) <= app.client.num_live
    await app.finish(*callers)
    await app.step()
    assert app.engine.is_empty and app.client.num_live == 0
    assert count_ends(app, "abort") > 0
    assert count_ends(app, "abort") + count_ends(app, "length") == 60


@STREAMS
async def test_a10_a_queued_request_whose_client_has_left_never_runs(stream: bool) -> None:
    app = ScheduledApp(max_num_seqs=1)
    first = await app.ask(max_tokens=5)
    await app.step()
    waiting = await app.ask(max_tokens=5, stream=stream, prompt="queued")
    await app.step()
    await depart(waiting)
    await app.finish(first)
    await app.step(3)
    assert len(app.engine.num_computed) == 1, "only the first one has ever computed anything"
    assert app.engine.is_empty and count_ends(app, "abort") == 1


@STREAMS
async def test_a11_a_long_prompt_stops_at_the_next_chunk(stream: bool) -> None:
    app = ScheduledApp(max_num_batched_tokens=16)
    caller = await app.ask(prompt="x" * 800, max_tokens=5, stream=stream)
    await app.step(3)
    await depart(caller)
    await app.step(5)
    assert app.engine.num_computed.total() == 3 * 16
    assert app.engine.is_empty


async def test_a14_requests_leave_no_memory_behind() -> None:
    app = ScheduledApp(num_blocks=32)
    app.engine.is_checking = False

    async def serve_some(num_requests: int) -> None:
        for number in range(num_requests):
            caller = await app.ask(prompt=f"number {number}", max_tokens=3, stream=number % 2 == 0, n=1 + number % 2)
            await app.step()
            if number % 3 == 0:
                await depart(caller)
            await app.finish(caller)
            app.engine.num_computed.clear()
        await app.step()
        gc.collect()

    tracemalloc.start()
    try:
        # The cache of prefixes and all tables of fixed size fill first.
        await serve_some(200)
        before, _ = tracemalloc.get_traced_memory()
        await serve_some(300)
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (after - before) / 300 < 100, "bytes that each request leaves"


# ---------------------------------------------------------------------- D: streams
@PATHS
@pytest.mark.parametrize("fields", [{}, {"n": 2}, {"logprobs": True}, {"stop": ["q"]}, {"echo": True}])
async def test_d7_finish_reason_is_in_every_choice_and_null_until_the_end(path: str, fields: dict[str, Any]) -> None:
    if path == CHAT and "echo" in fields:
        fields = {"top_logprobs": 2, "logprobs": True}
    if path == COMPLETIONS and "logprobs" in fields:
        fields = {"logprobs": 1}
    app = ScheduledApp()
    caller = await app.ask(path, stream=True, max_tokens=4, stream_options={"include_usage": True}, **fields)
    await app.finish(caller)
    *chunks, last = caller.read_chunks()
    assert last["choices"] == []
    for index in range(fields.get("n", 1)):
        reasons = [
            choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["index"] == index
        ]
        assert len(reasons) >= 4 and reasons == [None] * (len(reasons) - 1) + ["length"]


@pytest.mark.parametrize("echo", [False, True])
@pytest.mark.parametrize("max_num_batched_tokens", [4, 4096], ids=["chunked", "whole prompts"])
async def test_d13_usage_is_the_same_streamed_continuous_and_whole(echo: bool, max_num_batched_tokens: int) -> None:
    fields: dict[str, Any] = {"prompt": "abcdefghijklmnop", "n": 3, "max_tokens": 5, "echo": echo, "seed": 1}
    options = {"include_usage": True, "continuous_usage_stats": True}
    app = ScheduledApp(max_num_batched_tokens=max_num_batched_tokens, enable_prefix_caching=False)
    whole = await app.ask(**fields)
    await app.finish(whole)
    streamed = await app.ask(**fields, stream=True, stream_options=options)
    await app.finish(streamed)
    *chunks, last = streamed.read_chunks()
    usage = last["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (17, 15)
    assert '"usage":{"prompt_tokens":17,"completion_tokens":15,"total_tokens":32' in whole.body.decode()
    own = {chunk["choices"][0]["index"]: chunk["usage"] for chunk in chunks}
    assert [own[index]["completion_tokens"] for index in range(3)] == [5, 5, 5]
    assert all(one["prompt_tokens"] == 17 for one in own.values())


@PATHS
async def test_d18_a_server_may_tell_every_streams_usage_unasked(path: str) -> None:
    for is_forced in (False, True):
        async with connect(build_app(FakeEngineClient(), has_forced_usage=is_forced)) as client:
            *_, last = await get_chunks(await client.post(path, json=build_body(path, stream=True)))
        assert ("usage" in last and last["choices"] == []) == is_forced
        if is_forced:
            assert last["usage"]["completion_tokens"] == 2


# ---------------------------------------------------------------------- E: validation
async def test_e13_equal_request_ids_at_the_same_time_get_their_own_answers() -> None:
    app = ScheduledApp()
    name = {"x-request-id": "one"}
    twins = [
        await app.ask(prompt=prompt, max_tokens=1, echo=True, headers=name, stream=stream)
        for prompt, stream in (("first", False), ("second", True), ("third", False))
    ]
    await app.finish(*twins)
    for twin, prompt in zip(twins, ("first", "second", "third"), strict=True):
        assert twin.headers["x-request-id"] == "one"
        assert prompt in twin.body.decode()
    assert len(app.engine.num_computed) == 3


async def test_e13_a_request_id_of_a_megabyte_comes_back_short() -> None:
    app = ScheduledApp()
    caller = await app.ask(max_tokens=1, headers={"x-request-id": "x" * 1_000_000})
    await app.finish(caller)
    assert caller.status == 200 and len(caller.headers["x-request-id"]) == 128


@STREAMS
async def test_e19_a_templates_refusal_names_the_message(stream: bool) -> None:
    roles = ("user", "assistant", "user", "user", "assistant")
    body = {"messages": [{"role": role, "content": "a"} for role in roles], "stream": stream}
    async with connect(build_app(FakeEngineClient())) as client:
        response = await client.post(CHAT, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["message"]) == (400, "Roles must alternate.")
    assert error["param"] == "messages[3]"


async def test_e20_all_text_parts_of_all_messages_reach_the_model_in_order() -> None:
    engine = FakeEngineClient()
    parts = {"system": ["be", " brief"], "user": ["a", "b", "c"], "assistant": [], "tool": ["d"]}
    messages = [
        {"role": role, "content": [{"type": "text", "text": text} for text in texts]} for role, texts in parts.items()
    ]
    async with connect(build_app(engine)) as client:
        response = await client.post(CHAT, json={"messages": messages, "max_tokens": 2})
    assert response.status_code == 200, response.text
    prompt = "".join(map(chr, engine.requests[0].engine_request.prompt_token_ids))
    assert prompt == "system:be brief|user:abc|assistant:|tool:d|assistant:"


async def test_e17_whatever_is_refused_has_the_error_envelope() -> None:
    async with connect(build_app(FakeEngineClient())) as client:
        for path in ("/", "/nothing", "/v1/models/none", "/v1/models", COMPLETIONS, CHAT, "/tokenize"):
            for method in ("PUT", "PATCH", "DELETE", "TRACE"):
                response = await client.request(method, path)
                assert 400 <= response.status_code < 500, (method, path)
                (error,) = response.json().values()
                assert set(error) == {"message", "type", "param", "code"} and error["message"]
