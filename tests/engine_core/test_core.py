"""The busy loop: order of events, failure, idleness. The runner is a fake that samples what it is told."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import pytest

from engine_core.config import SchedulerConfig
from engine_core.core import EngineCore
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.messages import (
    EngineCommand,
    EngineCoreOutputs,
    EngineCoreRequest,
    FinishReason,
    ResetPrefixCache,
    SetLimits,
)
from engine_core.sampling_params import SamplingParams
from engine_core.scheduler.constraint import Constraint, Verdict
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.scheduler.scheduler import PauseState, Scheduler
from engine_core.snapshot import EngineSnapshot, TakeSnapshot
from engine_core.step_executor import DirectExecutor, PendingResult
from tests.engine_core.scheduler.scenario_helpers import Park

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


class LazyExecutor:
    """Runs a step when its result is asked for; writes down what happens when."""

    def __init__(self, runner: FakeRunner) -> None:
        self.log: list[tuple[str, int]] = []
        self._runner = runner

    def submit(self, output: SchedulerOutput) -> PendingResult:
        self.log.append(("submit", output.step_id))

        def wait() -> ModelRunnerOutput:
            self.log.append(("result", output.step_id))
            return self._runner.execute(output)

        return wait


class CoreFixture:
    def __init__(self, *, max_steps_in_flight: int = 1, constraints: Sequence[Constraint] = (), **config: int) -> None:
        self.runner = FakeRunner()
        self.executor = LazyExecutor(self.runner)
        self.published: list[EngineCoreOutputs] = []
        self.num_rests = 0
        self.now = 0.0
        self.scheduler = Scheduler(
            config=SchedulerConfig(**config),
            kv_cache=KVCacheManager(num_blocks=20, block_size=4),
            max_model_len=64,
            constraints=constraints,
            max_steps_in_flight=max_steps_in_flight,
        )
        self.core = EngineCore(
            scheduler=self.scheduler,
            executor=DirectExecutor(self.runner) if max_steps_in_flight == 1 else self.executor,
            publish=self.published.append,
            rest=self._rest,
            clock=lambda: self.now,
        )

    def _rest(self) -> None:
        self.num_rests += 1
        self.core.stop()

    def tokens(self) -> list[int]:
        return [
            token for message in self.published for output in message.as_records() for token in output.new_token_ids
        ]

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
    assert fixture.tokens() == [TOKEN] * 3
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
    stats = fixture.published[0].stats
    assert stats is not None and (stats.num_running, stats.num_waiting) == (0, 0), "T4: nothing else resets the gauges"


def test_t4_figures_come_even_while_nobody_may_run() -> None:
    fixture = CoreFixture()
    fixture.scheduler.pause(PauseState.PAUSED_ALL)
    fixture.add("a")
    fixture.core._drain_input(block=False)
    fixture.core.step()
    (message,) = fixture.published
    assert fixture.runner.steps == [] and message.as_records() == []
    assert message.stats is not None and message.stats.num_waiting == 1


def test_a_request_that_slipped_past_admission_ends_with_an_error_and_harms_nobody() -> None:
    fixture = CoreFixture()
    fixture.add("too-long", prompt=1000)
    fixture.add("a", max_tokens=1)
    fixture.core._drain_input(block=False)
    fixture.core.step()
    assert fixture.ends() == [("too-long", FinishReason.ERROR), ("a", FinishReason.LENGTH)]


def test_n3_a_request_that_the_scheduler_gives_up_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    fixture = CoreFixture(constraints=[Park("a", verdict=Verdict.STOP)])
    fixture.add("a")
    with caplog.at_level(logging.WARNING, logger="engine_core.core"):
        fixture.core.run_busy_loop()  # resting stops it
    assert fixture.ends() == [("a", FinishReason.ERROR)]
    (message,) = caplog.messages
    assert message.startswith("request a ended with an error: The request cannot be scheduled")


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


def test_a_pause_is_no_standstill() -> None:
    fixture = CoreFixture()
    fixture.add("a")
    fixture.scheduler.pause(PauseState.PAUSED_ALL)
    fixture.core._drain_input(block=False)
    fixture.now = 103.0
    assert fixture.core.seconds_since_progress() > 0.0
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


def test_x1_a_step_is_handed_on_before_the_one_before_it_is_waited_for() -> None:
    fixture = CoreFixture(max_steps_in_flight=2)
    fixture.add("a", max_tokens=3)
    fixture.core.run_busy_loop()
    assert fixture.tokens() == [TOKEN] * 3 and fixture.ends() == [("a", FinishReason.LENGTH)]
    # The prompt and two decodes; the end by length is foreseen, so that no further step is wasted (X4).
    assert fixture.executor.log[:5] == [("submit", 1), ("submit", 2), ("result", 1), ("submit", 3), ("result", 2)]
    assert [step.total_num_scheduled_tokens for step in fixture.runner.steps] == [3, 1, 1, 0]


def test_x4_an_abort_wastes_the_steps_in_flight_and_nothing_else() -> None:
    fixture = CoreFixture(max_steps_in_flight=2)
    fixture.add("a", max_tokens=40)
    fixture.add("b", max_tokens=6)
    fixture.runner.while_running = lambda: (
        fixture.core.abort_requests(("a",)) if len(fixture.runner.steps) == 3 else None
    )
    fixture.core.run_busy_loop()
    assert fixture.ends() == [("a", FinishReason.ABORT), ("b", FinishReason.LENGTH)]
    assert sum("a" in step.req_ids for step in fixture.runner.steps) == 4  # three before the abort was seen, one after
    assert fixture.scheduler.kv_cache.pool.num_free == 20


def test_stats_tell_how_long_each_part_took() -> None:
    fixture = CoreFixture()
    fixture.add("a", max_tokens=1)
    fixture.core._drain_input(block=False)
    fixture.runner.while_running = lambda: setattr(fixture, "now", fixture.now + 2.0)
    fixture.core.step()
    (message,) = fixture.published
    assert message.stats is not None
    assert (message.stats.schedule_time_s, message.stats.update_time_s, message.stats.step_time_s) == (0.0, 0.0, 2.0)


def test_an_idle_loop_keeps_house_once_and_then_sleeps() -> None:
    fixture = CoreFixture()
    fixture.add("a")
    fixture.core.run_busy_loop()  # resting stops it
    assert fixture.num_rests == 1 and fixture.ends() == [("a", FinishReason.LENGTH)]


def test_g1_requests_that_may_not_run_do_not_make_the_loop_spin() -> None:
    fixture = CoreFixture()
    fixture.scheduler.pause(PauseState.PAUSED_ALL)
    fixture.add("a")
    fixture.core._drain_input(block=False)
    waits: list[float | None] = []
    drain = fixture.core._drain_input

    def record(*, block: bool, timeout_s: float | None = None) -> None:
        waits.append(timeout_s)
        drain(block=block, timeout_s=timeout_s)

    fixture.core._drain_input = record  # type: ignore[method-assign]
    fixture.core.step()
    assert waits == [0.001] and fixture.runner.steps == []
    fixture.scheduler.pause(PauseState.UNPAUSED)
    fixture.core.run_busy_loop()
    assert fixture.ends() == [("a", FinishReason.LENGTH)]


@pytest.mark.parametrize("max_steps_in_flight", [1, 2])
def test_who_loses_blocks_is_told_in_time_with_the_time_at_which_that_was_scheduled(max_steps_in_flight: int) -> None:
    fixture = CoreFixture(max_steps_in_flight=max_steps_in_flight)
    for name in "ab":
        fixture.add(name, prompt=30, max_tokens=30)
    scheduled: list[tuple[str, float]] = []
    schedule = fixture.scheduler.schedule

    def note(now: float) -> SchedulerOutput:
        output = schedule(now)
        scheduled.extend((name, now) for name in output.preempted_req_ids)
        fixture.now += 0.5
        return output

    fixture.scheduler.schedule = note  # type: ignore[method-assign]
    fixture.core._drain_input(block=False)
    while len(fixture.ends()) < 2:
        fixture.core.step()
    assert scheduled
    assert [each for message in fixture.published for each in message.preemptions] == scheduled
    ended: set[str] = set()
    for message in fixture.published:
        assert not ended & {name for name, _ in message.preemptions}, "before its end is told"
        ended |= {output.request_id for output in message.outputs if output.finish_reason}


# ------------------------------------------------------------------ commands
def ask(fixture: CoreFixture, command: EngineCommand) -> Future[bool]:
    answer: Future[bool] = Future()
    fixture.core.ask(command, answer)
    return answer


def look(fixture: CoreFixture) -> Future[EngineSnapshot]:
    answer: Future[EngineSnapshot] = Future()
    fixture.core.ask(TakeSnapshot(), answer)
    return answer


def step_to_end(fixture: CoreFixture) -> None:
    """Do what the busy loop does until it would block."""
    fixture.core._drain_input(block=False)
    while fixture.core._has_work():
        fixture.core.step()
        fixture.core._drain_input(block=False)


def test_limits_are_set_between_two_steps_and_the_answer_says_so() -> None:
    fixture = CoreFixture(max_num_seqs=4)
    for name in "abc":
        fixture.add(name, max_tokens=4)
    answers: list[Future[bool]] = []

    def lower() -> None:
        if not answers:
            answers.append(ask(fixture, SetLimits(max_num_seqs=1)))
            fixture.add("d")

    fixture.runner.while_running = lower
    step_to_end(fixture)
    assert answers[0].result(0) is True
    entered = [[new.request_id for new in step.scheduled_new_reqs] for step in fixture.runner.steps]
    assert entered[:5] == [["a", "b", "c"], [], [], [], ["d"]]


def test_a_cap_above_what_was_allocated_is_answered_with_the_reason_and_the_loop_goes_on() -> None:
    fixture = CoreFixture(max_num_seqs=4)
    answer = ask(fixture, SetLimits(max_num_seqs=5))
    fixture.run_until_idle()
    with pytest.raises(ValueError, match="may be 1 to 4"):
        answer.result(0)


def test_the_prefix_cache_is_reset_only_while_nobody_owns_a_block_unless_they_give_them_up() -> None:
    fixture = CoreFixture()
    fixture.add("a", prompt=9, max_tokens=3)
    answers: list[bool] = []

    def reset() -> None:
        if len(fixture.runner.steps) < 3:
            pending = ask(fixture, ResetPrefixCache(reset_running=len(fixture.runner.steps) == 2))
            pending.add_done_callback(lambda done: answers.append(done.result()))

    fixture.runner.while_running = reset
    fixture.core._drain_input(block=False)
    for _ in range(2):
        fixture.core.step()
    assert answers == [False, True]
    assert not fixture.scheduler.kv_cache.pool.index


def test_a_command_whose_asker_has_left_is_not_carried_out() -> None:
    fixture = CoreFixture(max_num_seqs=4)
    answer = ask(fixture, SetLimits(max_num_seqs=1))
    assert answer.cancel()
    fixture.run_until_idle()
    assert fixture.scheduler.max_num_seqs == 4


def test_who_was_admitted_for_the_first_time_is_told_once_with_or_without_a_token() -> None:
    fixture = CoreFixture(max_num_batched_tokens=64, max_num_seqs=2, max_chunk_size=4)
    fixture.add("a", prompt=9, max_tokens=2)
    fixture.add("b", prompt=3, max_tokens=1)
    fixture.add("c", prompt=3, max_tokens=1)
    step_to_end(fixture)
    assert [message.started_req_ids for message in fixture.published][:3] == [["a", "b"], ["c"], []]
    assert sorted(name for message in fixture.published for name in message.started_req_ids) == ["a", "b", "c"]


def test_a_look_at_the_requests_is_answered_between_two_steps() -> None:
    fixture, futures = CoreFixture(), list[Future[EngineSnapshot]]()
    fixture.add("a", prompt=6, max_tokens=3)
    fixture.runner.while_running = lambda: futures.append(look(fixture))
    fixture.core._drain_input(block=False)
    fixture.core.step()
    snapshot = futures[0].result(timeout=0)
    (row,) = snapshot.running
    assert (row.request_id, row.num_computed_tokens, row.num_blocks, row.wait_reason) == ("a", 6, 2, "")
    assert snapshot.blocks.list_owners().count(0) == 2


def test_an_idle_engine_can_be_looked_at_and_keeps_house_once() -> None:
    fixture = CoreFixture()
    rested = threading.Semaphore(0)
    fixture.core._rest = rested.release
    thread = threading.Thread(target=fixture.core.run_busy_loop)
    thread.start()
    assert rested.acquire(timeout=10)
    for _ in range(3):
        assert look(fixture).result(timeout=10).num_running == 0
        assert fixture.core.seconds_since_progress() == 0.0, "it is idle, whoever looks"
    fixture.core.stop()
    thread.join(10)
    assert not rested.acquire(blocking=False)


def test_a_look_that_nobody_waits_for_any_more_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    fixture = CoreFixture()
    monkeypatch.setattr("engine_core.core.build_snapshot", lambda *args: pytest.fail("nobody asked"))
    assert look(fixture).cancel()
    fixture.run_until_idle()


def test_a_look_that_fails_costs_the_engine_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> EngineSnapshot:
        raise RuntimeError("no picture")

    fixture = CoreFixture()
    monkeypatch.setattr("engine_core.core.build_snapshot", fail)
    future = look(fixture)
    fixture.add("a", max_tokens=1)
    fixture.core.run_busy_loop()
    assert isinstance(future.exception(timeout=0), RuntimeError)
    assert fixture.ends() == [("a", FinishReason.LENGTH)]


def test_a_command_that_fails_for_no_fault_of_its_askers_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object, **kwargs: object) -> bool:
        raise RuntimeError("a block is lost")

    fixture = CoreFixture()
    monkeypatch.setattr(fixture.scheduler, "reset_prefix_cache", fail)
    answer = ask(fixture, ResetPrefixCache())
    with pytest.raises(RuntimeError, match="a block is lost"):
        fixture.core.run_busy_loop()
    assert not answer.done(), "it is the owner's to fail"
