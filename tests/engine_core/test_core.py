"""The busy loop: order of events, failure, idleness. The runner is a fake that samples what it is told."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from engine_core.config import SchedulerConfig
from engine_core.core import EngineCore
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.messages import EngineCoreOutputs, EngineCoreRequest, FinishReason
from engine_core.sampling_params import SamplingParams
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.scheduler.scheduler import Scheduler
from engine_core.step_executor import DirectExecutor

TOKEN = 5


class FakeRunner:
    """Samples TOKEN for whoever reached its last known token; calls a hook while the step "runs"."""

    def __init__(self) -> None:
        self.steps: list[SchedulerOutput] = []
        self.while_running: Callable[[], None] = lambda: None
        self._known: dict[str, int] = {}
        self._computed: dict[str, int] = {}

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        self.steps.append(output)
        self.while_running()
        for data in output.scheduled_new_reqs:
            self._known[data.request_id] = len(data.token_ids)
            self._computed[data.request_id] = data.num_computed_tokens
        sampled = {}
        for request_id, num in output.num_scheduled_tokens.items():
            self._computed[request_id] += num
            if self._computed[request_id] == self._known[request_id]:
                self._known[request_id] += 1
                sampled[request_id] = [TOKEN]
        return ModelRunnerOutput.of(output, sampled)


class CoreFixture:
    def __init__(self, **config: int) -> None:
        self.runner = FakeRunner()
        self.published: list[EngineCoreOutputs] = []
        self.now = 0.0
        scheduler = Scheduler(
            config=SchedulerConfig(**config),
            kv_cache=KVCacheManager(num_blocks=20, block_size=4),
            max_model_len=64,
        )
        self.core = EngineCore(
            scheduler=scheduler,
            executor=DirectExecutor(self.runner),
            publish=self.published.append,
            clock=lambda: self.now,
        )

    def add(self, request_id: str, *, prompt: int = 3, max_tokens: int = 2) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self.core.add_request(EngineCoreRequest(request_id, [1] * prompt, params, arrival_time=0.0))

    def run_until_idle(self) -> None:
        """Run the loop on this thread; it stops before it would block."""
        self.core.stop()
        self.core.run_busy_loop()

    def ends(self) -> list[tuple[str, FinishReason]]:
        return [
            (output.request_id, output.finish_reason)
            for message in self.published
            for output in message.outputs
            if output.finish_reason
        ]


def test_requests_run_to_their_end_and_their_tokens_are_published() -> None:
    fixture = CoreFixture()
    fixture.add("a", max_tokens=3)
    thread = threading.Thread(target=fixture.core.run_busy_loop)
    done = threading.Event()
    fixture.core._publish = lambda message: (  # type: ignore[assignment, func-returns-value]
        fixture.published.append(message),
        done.set() if fixture.ends() and not message.as_records() else None,
    )
    thread.start()
    assert done.wait(10), "the step that tells the runner of the finish comes after the last token"
    fixture.core.stop()
    thread.join(10)
    tokens = [
        token for message in fixture.published for output in message.as_records() for token in output.new_token_ids
    ]
    assert tokens == [TOKEN] * 3
    assert fixture.ends() == [("a", FinishReason.LENGTH)]
    assert fixture.runner.steps[-1].finished_req_ids == ["a"]
    stats = fixture.published[-1].stats
    assert stats is not None
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)


def test_an_abort_during_a_step_beats_the_finish_in_it() -> None:
    fixture = CoreFixture()
    fixture.add("a", max_tokens=1)
    fixture.core._drain_input(block=False)
    fixture.runner.while_running = lambda: fixture.core.abort_requests(("a",))
    fixture.core.step()
    assert fixture.ends() == [("a", FinishReason.ABORT)]


def test_an_abort_of_a_waiting_request_is_answered_without_a_step() -> None:
    fixture = CoreFixture()
    fixture.add("a")
    fixture.core.abort_requests(("a", "unknown"))
    fixture.run_until_idle()
    assert fixture.ends() == [("a", FinishReason.ABORT)]
    assert fixture.runner.steps == []


def test_a_request_that_slipped_past_admission_ends_with_an_error_and_harms_nobody() -> None:
    fixture = CoreFixture()
    fixture.add("too-long", prompt=1000)
    fixture.add("a", max_tokens=1)
    fixture.core._drain_input(block=False)
    fixture.core.step()
    assert fixture.ends() == [("too-long", FinishReason.ERROR), ("a", FinishReason.LENGTH)]


def test_a_failing_runner_ends_the_loop_with_its_exception() -> None:
    fixture = CoreFixture()
    fixture.add("a")

    def fail() -> None:
        raise RuntimeError("device lost")

    fixture.runner.while_running = fail
    with pytest.raises(RuntimeError, match="device lost"):
        fixture.core.run_busy_loop()


def test_progress_ages_only_with_work_in_hand() -> None:
    fixture = CoreFixture()
    fixture.now = 100.0
    assert fixture.core.seconds_since_progress() == 0.0
    fixture.add("a")
    fixture.core._drain_input(block=False)
    fixture.now = 103.0
    assert fixture.core.seconds_since_progress() == 3.0
    fixture.core.step()
    assert fixture.core.seconds_since_progress() == 0.0


def test_waking_up_never_shows_the_age_of_the_idle_time(monkeypatch: pytest.MonkeyPatch) -> None:
    fixture, ages = CoreFixture(), []

    def write_and_look(core: EngineCore, name: str, value: object) -> None:
        object.__setattr__(core, name, value)
        ages.append(core.seconds_since_progress())  # as a thread that gets its turn right here

    fixture.now = 3600.0
    fixture.add("a")
    monkeypatch.setattr(EngineCore, "__setattr__", write_and_look)
    fixture.core._drain_input(block=True)
    assert set(ages) == {0.0}
