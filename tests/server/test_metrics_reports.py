"""What others' metrics got wrong (field reports G), tried on the real scheduler, loop and output processor."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from engine_core import FinishReason
from server.generation import GenerationOutput
from server.logs.request_log import RequestEnd
from server.output_processor import OutputStream
from tests.server.http_records import create_answer, create_http_record
from tests.server.metered_engine import STEP_S, MeteredEngine
from tests.server.metric_samples import read_samples


async def take_last(stream: OutputStream) -> GenerationOutput:
    """A finished stream's last output."""
    *_, last = [part async for part in stream]
    return last


def prompt(length: int, start: int = 0) -> list[int]:
    return list(range(start, start + length))


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_g1_when_everything_is_aborted_no_gauge_stays_up(max_steps_in_flight: int) -> None:
    engine = MeteredEngine(num_blocks=8, block_size=4, max_num_seqs=3, max_steps_in_flight=max_steps_in_flight)
    names = [f"r{i}" for i in range(9)]
    for i, name in enumerate(names):
        engine.add(name, prompt(6, 100 * i), 90)
    seen = []

    def leave_all(number: int) -> None:
        if number == 4:
            seen.append(read_samples(engine.metrics))
            for name in names:
                engine.leave(name)

    engine.while_running = leave_all
    engine.run()
    gauges = [
        *((f"vllm:{name}", "") for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")),
        *(("vllm:num_requests_waiting_by_reason", f"reason={reason}") for reason in ("capacity", "deferred")),
        *((f"vllm_{name}", "") for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio")),
        *((f"vllm_{name}", "") for name in ("prompt_tokens_per_step", "generation_tokens_per_step")),
        ("vllm:gpu_cache_usage_perc", ""),
        ("pointsman:num_requests_parked", ""),
    ]
    (before,) = seen
    assert before["vllm:num_requests_running", ""] > 0 and before["vllm:num_requests_waiting", ""] >= 6
    assert before["vllm:gpu_cache_usage_perc", ""] > 0 and before["vllm_generation_tokens_per_step", ""] > 0
    after = read_samples(engine.metrics)
    assert {key: after[key] for key in gauges} == dict.fromkeys(gauges, 0)
    assert after["vllm:request_success_total", "finished_reason=abort"] == 9


def test_g2_every_end_is_counted_once_under_its_own_reason() -> None:
    engine = MeteredEngine(num_blocks=64, block_size=4, max_num_seqs=8)
    engine.add("length", prompt(5), 3)
    engine.add("eos", prompt(5, 50), 400, eos_token_ids=frozenset(range(16)))
    engine.add("stop string", prompt(5, 100), 200, stop=[chr(3)])
    engine.add("left", prompt(5, 150), 200)
    engine.add("left while it waited", prompt(9, 200), 200)
    engine.leave("left while it waited")
    engine.fail("error")
    engine.add("error", prompt(5, 250), 200)
    engine.while_running = lambda number: engine.leave("left") if number == 5 else None
    engine.run()
    reasons = ("stop", "length", "abort", "error", "repetition")
    found = read_samples(engine.metrics)
    counted = [found["vllm:request_success_total", f"finished_reason={reason}"] for reason in reasons]
    assert counted == [2, 1, 2, 1, 0]
    assert found["vllm:e2e_request_latency_seconds_count", ""] == 6
    assert {record.request_id: record.finish_reason for record in engine.metrics.ended} == {
        "length": FinishReason.LENGTH,
        "eos": FinishReason.STOP,
        "stop string": FinishReason.STOP,
        "left": FinishReason.ABORT,
        "left while it waited": FinishReason.ABORT,
        "error": FinishReason.ERROR,
    }


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_g5_a_preempted_request_has_its_first_token_once(max_steps_in_flight: int) -> None:
    engine = MeteredEngine(num_blocks=8, block_size=4, max_num_seqs=4, max_steps_in_flight=max_steps_in_flight)
    for i in range(3):
        engine.add(f"r{i}", prompt(7, 100 * i), 20)
    engine.run()
    found = read_samples(engine.metrics)
    assert found["vllm:num_preemptions_total", ""] > 0
    assert found["vllm_preempted_requests_total", ""] == found["vllm:num_preemptions_total", ""]
    assert found["vllm:time_to_first_token_seconds_count", ""] == 3
    assert found["vllm:prompt_tokens_total", ""] == 21, "a prompt that was computed twice was sent once"
    assert found["vllm:request_queue_time_seconds_count", ""] == 3
    assert found["vllm:generation_tokens_total", ""] == 60


def test_g8_no_series_comes_or_goes_with_what_the_server_does() -> None:
    engine = MeteredEngine(num_blocks=8, block_size=4, max_num_seqs=2, enable_prefix_caching=False)
    fresh = set(read_samples(engine.metrics))
    for i in range(3):
        engine.add(f"r{i}", prompt(7, 100 * i), 20)
    engine.run()
    other = MeteredEngine(max_num_seqs=8, policy="priority", max_steps_in_flight=2)
    assert set(read_samples(engine.metrics)) == set(read_samples(other.metrics)) == fresh


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_g11_each_step_is_observed_once_with_the_tokens_that_it_computed(max_steps_in_flight: int) -> None:
    engine = MeteredEngine(
        num_blocks=64, block_size=16, max_num_batched_tokens=4, max_num_seqs=4, max_steps_in_flight=max_steps_in_flight
    )
    engine.add("r", prompt(10), 2)
    engine.run()
    steps = [
        (stats.num_step_prompt_tokens, stats.num_step_generation_tokens)
        for stats in engine.metrics.stats
        if stats.num_steps
    ]
    assert steps == [(4, 0), (4, 0), (2, 1), (0, 1)]
    found = read_samples(engine.metrics)
    assert found["vllm:iteration_tokens_total_count", ""] == 4
    assert found["vllm:iteration_tokens_total_sum", ""] == 12
    assert found["vllm:iteration_tokens_total_bucket", "le=1.0"] == 1
    assert found["vllm:iteration_tokens_total_bucket", "le=8.0"] == 4


def test_a_requests_phases_add_up_to_its_time() -> None:
    engine = MeteredEngine(num_blocks=64, block_size=16, max_num_batched_tokens=4, max_num_seqs=1)
    engine.add("first", prompt(4), 2)
    engine.add("second", prompt(8, 50), 3)
    engine.run()
    found = read_samples(engine.metrics)
    sums = {
        name: found[f"vllm:{name}_sum", ""]
        for name in (
            *("request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds"),
            *("request_inference_time_seconds", "e2e_request_latency_seconds", "time_to_first_token_seconds"),
        )
    }
    # `second` waits for two steps, computes its prompt in two, and gets a token in the last of them and two more.
    assert sums["request_queue_time_seconds"] == 2 * STEP_S
    assert sums["request_prefill_time_seconds"] == (1 + 2) * STEP_S
    assert sums["request_decode_time_seconds"] == (1 + 2) * STEP_S
    assert sums["request_inference_time_seconds"] == 6 * STEP_S
    assert sums["time_to_first_token_seconds"] == 5 * STEP_S
    assert sums["e2e_request_latency_seconds"] == 8 * STEP_S


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
@pytest.mark.parametrize("seed", range(4))
async def test_usage_counters_and_log_agree_over_a_mixed_load(seed: int, max_steps_in_flight: int) -> None:
    rng = random.Random(seed)
    engine = MeteredEngine(num_blocks=16, block_size=4, max_num_seqs=6, max_steps_in_flight=max_steps_in_flight)
    shared = prompt(8, 900)
    streams = {}
    for i in range(40):
        own = [*(shared if rng.random() < 0.5 else []), *prompt(rng.randint(1, 9), 100 * i)]
        stop = [chr(rng.randrange(16))] if rng.random() < 0.3 else []
        ends = frozenset({rng.randrange(16)}) if rng.random() < 0.3 else frozenset()
        streams[f"r{i}"] = engine.add(f"r{i}", own, rng.randint(1, 30), stop=stop, eos_token_ids=ends, seed=i)
    leavers = {rng.randint(1, 30): f"r{rng.randrange(40)}" for _ in range(8)}
    engine.while_running = lambda number: engine.leave(leavers[number]) if number in leavers else None
    engine.run()

    found, ended = read_samples(engine.metrics), engine.metrics.ended
    assert sorted(record.request_id for record in ended) == sorted(streams), "each ends once"
    assert found["vllm:num_preemptions_total", ""] > 0
    lines = {each.request_id: RequestEnd(create_http_record(answer=create_answer(each))).fields for each in ended}
    names = ("finish_reason", "input_tokens", "cached_tokens", "output_tokens", "preemptions")
    told = [(request_id, *(line[name] for name in names)) for request_id, line in lines.items()]
    reasons = Counter(reason for _, reason, *_ in told)
    assert reasons["abort"] > 0 and reasons["stop"] > 0 and reasons["length"] > 0
    for reason, count in reasons.items():
        assert found["vllm:request_success_total", f"finished_reason={reason}"] == count

    assert sum(output for *_, output, _ in told) == found["vllm:generation_tokens_total", ""]
    assert sum(preemptions for *_, preemptions in told) == found["vllm:num_preemptions_total", ""]
    started = [(prompt, cached) for _, _, prompt, cached, output, _ in told if output]
    assert sum(prompt for prompt, _ in started) == found["vllm:prompt_tokens_total", ""]
    assert sum(cached for _, cached in started) == found["vllm:prompt_tokens_cached_total", ""] > 0
    sources = ("local_compute", "local_cache_hit", "external_kv_transfer")
    by_source = [found["vllm:prompt_tokens_by_source_total", f"source={source}"] for source in sources]
    assert sum(by_source) == found["vllm:prompt_tokens_total", ""]
    assert len(started) == found["vllm:time_to_first_token_seconds_count", ""]

    for request_id, reason, prompt_tokens, cached, output, _ in told:
        if reason != "abort":
            usage = await take_last(streams[request_id])
            assert (usage.finish_reason, usage.num_output_tokens) == (reason, output)
            assert usage.num_cached_tokens == cached <= prompt_tokens
    assert found["vllm:num_requests_running", ""] == found["vllm:num_requests_waiting", ""] == 0
    assert found["vllm:kv_cache_usage_perc", ""] == 0
