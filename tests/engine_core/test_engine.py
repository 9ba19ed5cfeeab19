"""The engine's thread: loading, capacity, death, stopping; and sameness of tokens, on a random checkpoint."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine_core.config import CacheConfig, DeviceConfig, EngineConfig, ModelConfig, SchedulerConfig
from engine_core.engine import Engine, open_checkpoint
from engine_core.errors import ConfigError, EngineDeadError, EngineFailure
from engine_core.messages import (
    EngineCoreOutputs,
    EngineCoreRequest,
    EnginePhase,
    EngineState,
    FinishReason,
    ResetPrefixCache,
    SetLimits,
)
from engine_core.model.runner import ModelRunner
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.snapshot import CACHED
from tests.engine_core.model_checkpoints import VOCAB_SIZE, save_checkpoint
from tests.helpers import EngineDriver, greedy

CACHE = CacheConfig(block_size=4, num_blocks=200)
PROMPTS = [[(7 * i + j * j) % VOCAB_SIZE for j in range(5 + 6 * i)] for i in range(8)]
TOGETHER = SchedulerConfig(max_num_batched_tokens=256, max_num_seqs=8)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    save_checkpoint(path, "llama")
    return path


@pytest.fixture(scope="module")
def alone(checkpoint: Path) -> list[list[int]]:
    """Each prompt's tokens when it has the engine to itself, whole prompt at once, nothing cached."""
    with EngineDriver(checkpoint, cache=replace(CACHE, enable_prefix_caching=False)) as driver:
        return [driver.generate([prompt], greedy(20))[0] for prompt in PROMPTS]


def load(checkpoint: Path, **cache: int) -> tuple[EngineState, list[EngineCoreOutputs]]:
    """Run an engine until it has loaded or died, and stop it."""
    published: list[EngineCoreOutputs] = []
    states: list[EngineState] = []
    engine = Engine(
        EngineConfig(ModelConfig(checkpoint), CacheConfig(**{"block_size": 4, **cache}), device=DeviceConfig("torch")),
        open_checkpoint(checkpoint),
        publish=published.append,
        on_state=states.append,
    )
    engine.start()
    engine.shutdown(60)
    return states[-1] if states[-1].phase is EnginePhase.DEAD else states[-2], published


@pytest.mark.parametrize(
    ("cache", "scheduler"),
    [
        pytest.param(CACHE, TOGETHER, id="in one batch"),
        pytest.param(CACHE, replace(TOGETHER, max_num_batched_tokens=9), id="in chunks of a small budget"),
        pytest.param(CACHE, replace(TOGETHER, max_chunk_size=3), id="in chunks of three"),
        pytest.param(replace(CACHE, num_blocks=24), TOGETHER, id="preempted for want of blocks"),
        pytest.param(replace(CACHE, enable_prefix_caching=False), TOGETHER, id="without prefix cache"),
    ],
)
def test_tokens_are_those_that_each_request_gets_alone(
    checkpoint: Path, alone: list[list[int]], cache: CacheConfig, scheduler: SchedulerConfig
) -> None:
    with EngineDriver(checkpoint, cache=cache, scheduler=scheduler) as driver:
        assert driver.generate(PROMPTS, greedy(20)) == alone
        assert driver.generate(PROMPTS, greedy(20)) == alone, "the second time over what the cache kept"


def test_a_repeated_prompt_is_served_from_the_cache(checkpoint: Path) -> None:
    with EngineDriver(checkpoint, cache=CACHE) as driver:
        driver.generate([PROMPTS[5]], greedy(1))
        driver.submit(PROMPTS[5], greedy(1))
        (output,) = driver.next_outputs() or driver.next_outputs()
        assert output.num_cached_tokens == (len(PROMPTS[5]) - 1) // 4 * 4


def test_loading_reports_progress_and_what_the_pool_holds(checkpoint: Path) -> None:
    state, published = load(checkpoint, num_blocks=100)
    assert state.phase is EnginePhase.READY
    assert (state.num_blocks, state.block_size, state.max_model_len) == (100, 4, 256)
    assert state.kv_bytes == 101 * 4 * 3 * 2 * 2 * 16 * 4, (
        "101 pages of 4 tokens, 3 layers, K and V, 2 heads of 16, fp32"
    )
    assert state.weights_bytes > 97 * 48 * 4
    assert published == []


def test_a_pool_smaller_than_the_context_lowers_it(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        state, _ = load(checkpoint, num_blocks=10)
    assert state.max_model_len == 40
    assert "requests end at 40" in caplog.text


def test_a_pool_that_memory_does_not_hold_is_a_sentence_not_a_kill(checkpoint: Path) -> None:
    state, published = load(checkpoint, num_blocks=10**9)
    assert state.phase is EnginePhase.DEAD
    assert "at most" in state.detail
    assert state.failure is EngineFailure.MEMORY
    assert [message.engine_error for message in published] == [state.detail]


def test_a_block_size_that_the_backend_lacks_is_refused_before_anything_starts(checkpoint: Path) -> None:
    config = EngineConfig(ModelConfig(checkpoint), CacheConfig(block_size=48), device=DeviceConfig("cpu"))
    with pytest.raises(ConfigError, match="32, 64, 128"):
        Engine(config, open_checkpoint(checkpoint), publish=lambda outputs: None)


class PanicError(BaseException):
    """As a panic in a Rust library arrives in Python."""


@pytest.mark.parametrize("kind", [RuntimeError, PanicError])
def test_a_failing_step_kills_the_engine_and_says_so_once(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException]
) -> None:
    def fail(self: ModelRunner, output: SchedulerOutput) -> ModelRunnerOutput:
        raise kind("device lost")

    with EngineDriver(checkpoint, cache=CACHE) as driver:
        monkeypatch.setattr(ModelRunner, "execute", fail)
        driver.submit([1, 2, 3], greedy(5))
        message = driver.outputs.get(timeout=60)
        assert message.engine_error == f"{kind.__name__}: device lost"
        assert driver.engine.state.phase is EnginePhase.DEAD
        with pytest.raises(EngineDeadError, match="device lost"):
            driver.submit([1], greedy(1))
    assert driver.outputs.empty()


def test_logits_that_are_not_finite_end_one_request_only(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original: Callable[[ModelRunner, SchedulerOutput], ModelRunnerOutput] = ModelRunner.execute

    def spoil(self: ModelRunner, output: SchedulerOutput) -> ModelRunnerOutput:
        result = original(self, output)
        if "r1" in output.req_ids:
            result.token_ids[output.req_ids.index("r1")] = -1
            result.errors["r1"] = "not finite"
        return result

    monkeypatch.setattr(ModelRunner, "execute", spoil)
    with EngineDriver(checkpoint, cache=CACHE) as driver:
        driver.submit(PROMPTS[0], greedy(3))
        driver.submit(PROMPTS[1], greedy(3))
        ends = {}
        while len(ends) < 2:
            ends |= {
                output.request_id: output.finish_reason for output in driver.next_outputs() if output.finish_reason
            }
    assert ends == {"r1": FinishReason.ERROR, "r2": FinishReason.LENGTH}


def test_ids_that_the_tokenizer_does_not_know_are_never_sampled(checkpoint: Path) -> None:
    drawn = greedy(60, temperature=100.0, seed=3)
    with EngineDriver(checkpoint, cache=CACHE) as driver:
        assert max(driver.generate([PROMPTS[0]], drawn)[0]) > 90
    with EngineDriver(checkpoint, cache=CACHE, num_token_ids=20) as driver:
        assert max(driver.generate([PROMPTS[0]], drawn)[0]) < 20


def test_an_abort_ends_a_running_request(checkpoint: Path) -> None:
    with EngineDriver(checkpoint, cache=CACHE) as driver:
        request_id = driver.submit([1, 2, 3], greedy(250))
        driver.next_outputs()
        driver.engine.abort_requests([request_id])
        reasons = []
        while not reasons:
            reasons = [output.finish_reason for output in driver.next_outputs() if output.finish_reason]
        assert reasons == [FinishReason.ABORT]


def test_requests_are_refused_before_ready_and_after_stopping(checkpoint: Path) -> None:
    engine = Engine(
        EngineConfig(ModelConfig(checkpoint), CACHE, device=DeviceConfig("torch")),
        open_checkpoint(checkpoint),
        publish=lambda outputs: None,
    )
    request = EngineCoreRequest("r", [1], greedy(1), arrival_time=0.0)
    with pytest.raises(EngineDeadError, match="loading"):
        engine.add_request(request)
    engine.start()
    engine.shutdown(60)
    assert engine.state.phase is EnginePhase.STOPPED
    with pytest.raises(EngineDeadError, match="stopped"):
        engine.add_request(request)


def test_a_command_is_answered_by_an_engine_that_runs_and_by_no_other(checkpoint: Path) -> None:
    with EngineDriver(checkpoint, cache=CACHE, scheduler=SchedulerConfig(max_num_seqs=4)) as driver:
        assert driver.engine.ask(SetLimits(max_num_seqs=2)).result(60) is True
        assert driver.engine.ask(ResetPrefixCache()).result(60) is True
        with pytest.raises(ValueError, match="may be 1 to 4"):
            driver.engine.ask(SetLimits(max_num_seqs=5)).result(60)
        assert not driver.engine._unanswered
    with pytest.raises(EngineDeadError, match="stopped"):
        driver.engine.ask(ResetPrefixCache())


def test_whoever_waits_for_an_answer_when_the_engine_dies_hears_of_it(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[Future[Any] | None] = []

    with EngineDriver(checkpoint, cache=CACHE) as driver:

        def die(self: ModelRunner, output: SchedulerOutput) -> ModelRunnerOutput:
            answers.extend((driver.engine.ask(ResetPrefixCache()), driver.engine.take_snapshot()))
            raise RuntimeError("device lost")

        monkeypatch.setattr(ModelRunner, "execute", die)
        driver.submit([1], greedy(1))
        assert driver.outputs.get(timeout=60).engine_error is not None
        for answer in answers:
            assert answer is not None
            with pytest.raises(EngineDeadError, match="device lost"):
                answer.result(60)


def test_stopped_is_not_said_before_the_last_step_has_ended(checkpoint: Path) -> None:
    threads: list[str] = []

    def note(state: EngineState) -> None:
        if state.phase is EnginePhase.STOPPED:
            threads.extend(thread.name for thread in threading.enumerate())

    config = EngineConfig(
        ModelConfig(checkpoint), CACHE, SchedulerConfig(async_scheduling=True), device=DeviceConfig("torch")
    )
    engine = Engine(config, open_checkpoint(checkpoint), publish=lambda outputs: None, on_state=note)
    engine.start()
    engine.shutdown(60)
    assert "engine-core" in threads and "engine-steps" not in threads


def test_a_real_engine_can_be_looked_at_once_it_is_ready(checkpoint: Path) -> None:
    config = EngineConfig(ModelConfig(checkpoint), CACHE, device=DeviceConfig("torch"))
    assert Engine(config, open_checkpoint(checkpoint), publish=lambda outputs: None).take_snapshot() is None
    with EngineDriver(checkpoint, cache=CACHE) as driver:
        driver.generate([PROMPTS[3]], greedy(4))
        future = driver.engine.take_snapshot()
        assert future is not None
        snapshot = future.result(timeout=60)
        assert (snapshot.num_running, snapshot.blocks.num_free, snapshot.blocks.num_blocks) == (0, 200, 200)
        assert snapshot.blocks.list_owners().count(CACHED) == len(PROMPTS[3] + [0] * 3) // 4
    assert driver.engine.take_snapshot() is None
