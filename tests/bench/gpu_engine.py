"""Stages `engine-0.6b` and `engine-8b`: the product's engine on models of real shapes, fed with tokens, no HTTP.

Decoding at several batch sizes with graphs and overlap on and off, what the device and the host did meanwhile, and one
long prompt.
"""

from __future__ import annotations

import gc
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from engine_core import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    EngineCoreOutputs,
    EngineCoreRequest,
    EnginePhase,
    EngineState,
    ModelConfig,
    SamplingParams,
    SchedulerConfig,
)
from engine_core.engine import Engine
from engine_core.model.arch import ArchSpec
from engine_core.model.checkpoint import Checkpoint
from engine_core.model.compute import Machine
from tests.bench.gpu_device import Bench, build_machine
from tests.bench.gpu_models import decode_floor, prefill_floor, random_checkpoint
from tests.bench.gpu_probe import HostTimes, Replays, WatchedAccelerator, watching_host
from tests.bench.gpu_report import Goal

_WAIT_S = 60.0
_MAX_IDLE_PERCENT = 3.0
_LONG_PROMPT = 8192
_ANSWER_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Way:
    """How an engine is set up."""

    graphs: bool
    overlap: bool

    @property
    def name(self) -> str:
        return f"graphs {'on' if self.graphs else 'off'}, overlap {'on' if self.overlap else 'off'}"


BEST = Way(graphs=True, overlap=True)
WAYS = (BEST, Way(graphs=True, overlap=False), Way(graphs=False, overlap=True), Way(graphs=False, overlap=False))


@dataclass(frozen=True, slots=True)
class Plan:
    """What is asked of a model.

    Attributes:
        model: Of gpu_models.CONFIGS.
        prompt: Tokens of a prompt.
        steps: Decode steps that are measured.
        batches: By each way of setting up.
        goals: By batch, for the best way.
        long_prompt: Tokens of the one prompt whose time is measured.
    """

    model: str
    prompt: int
    steps: int
    batches: dict[Way, tuple[int, ...]]
    goals: dict[int, Goal]
    long_prompt: int = _LONG_PROMPT

    @property
    def max_batch(self) -> int:
        return max(batch for batches in self.batches.values() for batch in batches)

    @property
    def max_model_len(self) -> int:
        # The first to decode goes on while the last one's prompt is computed.
        num_prompt_steps = -(-self.max_batch * self.prompt // _LONG_PROMPT)
        return max(self.long_prompt, self.prompt + self.steps + num_prompt_steps) + 64


_SMALL = Plan(
    model="Qwen3-0.6B",
    prompt=256,
    steps=100,
    batches=dict.fromkeys(WAYS, (1, 8, 32, 64, 256)),
    goals={1: Goal(at_most=1.0)},
)
_LARGE = Plan(
    model="Qwen3-8B",
    prompt=512,
    steps=60,
    batches=dict.fromkeys(WAYS, (1, 8, 32, 64, 256)),
    goals={1: Goal(at_most_floors=1.10), 64: Goal(at_most_floors=1.20)},
)
_TINY = Plan(
    model="tiny",
    prompt=20,
    steps=4,
    batches={BEST: (1, 2), WAYS[1]: (1,), WAYS[3]: (2,)},
    goals={1: Goal(at_most=1.0)},
    long_prompt=64,
)


def run_engine_0_6b(bench: Bench) -> None:
    """Measure the small model."""
    _run(bench, bench.pick(_SMALL, _TINY))


def run_engine_8b(bench: Bench) -> None:
    """Measure the large model."""
    _run(bench, bench.pick(_LARGE, _TINY))


def _run(bench: Bench, plan: Plan) -> None:
    checkpoint = random_checkpoint(plan.model, bench.device)
    answers: dict[Way, list[int]] = {}
    for way, batches in plan.batches.items():
        replays, host = Replays(bench.is_dry), HostTimes()
        machine = build_machine(
            is_dry=bench.is_dry,
            wrap=lambda accelerator, noted=replays: WatchedAccelerator(accelerator, noted),  # type: ignore[misc]
        )
        started = time.perf_counter()
        with watching_host(host), serving(checkpoint, plan, way, machine) as driver:
            if way == BEST:
                bench.sink.add(f"{plan.model}: engine ready after", "s", [time.perf_counter() - started])
            for batch in batches:
                _measure_decode(bench, plan, way, driver, batch, replays, host)
            if way == BEST:
                _measure_prompt(bench, plan, driver)
            answers[way] = _answer(driver)
    _compare_answers(bench, plan, answers)


# ---------------------------------------------------------------------- one engine
@dataclass(slots=True)
class Seen:
    """What an engine published.

    Attributes:
        steps: (seconds, tokens) of each step that brought some.
        schedule_s: Of each step.
        update_s: Of each step.
        finished: Requests that have ended.
        errors: What went wrong.
        keeps_tokens: Whether ``tokens`` is filled: at 256 requests a step it would be felt.
        tokens: By request.
    """

    steps: list[tuple[float, int]] = field(default_factory=list)
    schedule_s: list[float] = field(default_factory=list)
    update_s: list[float] = field(default_factory=list)
    finished: set[str] = field(default_factory=set)
    errors: list[str] = field(default_factory=list)
    keeps_tokens: bool = False
    tokens: dict[str, list[int]] = field(default_factory=dict)


class Driver:
    """Feeds one engine and listens to it.

    Args:
        arch: Of its model.
    """

    def __init__(self, arch: ArchSpec) -> None:
        self.arch = arch
        self.engine: Engine  # set once it is made: it is made with this object's methods
        self.seen = Seen()
        self._news = threading.Condition()
        self._rng = random.Random(0)
        self._count = 0

    def publish(self, outputs: EngineCoreOutputs) -> None:
        """Take what a step brought; on the engine's thread."""
        now = time.perf_counter()
        records = [record for record in outputs.outputs if record.new_token_ids]
        num_tokens = len(outputs.token_ids) + sum(len(record.new_token_ids) for record in records)
        with self._news:
            seen = self.seen
            if num_tokens:
                seen.steps.append((now, num_tokens))
            for record in outputs.as_records() if seen.keeps_tokens else ():
                seen.tokens.setdefault(record.request_id, []).extend(record.new_token_ids)
            if outputs.stats is not None and outputs.stats.num_steps:
                seen.schedule_s.append(outputs.stats.schedule_time_s)
                seen.update_s.append(outputs.stats.update_time_s)
            seen.finished |= {each.request_id for each in outputs.outputs if each.finish_reason}
            seen.errors += [each.error for each in outputs.outputs if each.error]
            seen.errors += [outputs.engine_error] if outputs.engine_error else []
            self._news.notify_all()

    def on_state(self, state: EngineState) -> None:
        """Wake whoever waits for the engine."""
        with self._news:
            if state.phase is EnginePhase.DEAD:
                self.seen.errors.append(f"the engine died: {state.detail}")
            self._news.notify_all()

    def wait_until_ready(self) -> None:
        """Wait for the end of loading."""
        self.wait_for(lambda: self.engine.state.phase is EnginePhase.READY)

    def send(self, count: int, *, prompt: int, max_tokens: int, temperature: float = 0.0) -> list[str]:
        """Send requests of random prompts, no two alike; return their ids."""
        self.seen = Seen()
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, ignore_eos=True)
        names = []
        for _ in range(count):
            self._count += 1
            tokens = [self._rng.randrange(self.arch.vocab_size) for _ in range(prompt)]
            names.append(f"r{self._count}")
            self.engine.add_request(EngineCoreRequest(names[-1], tokens, params, arrival_time=time.monotonic()))
        return names

    def ask(self, prompt: Sequence[int], params: SamplingParams) -> list[int]:
        """Send one request and return its answer."""
        self.seen = Seen(keeps_tokens=True)
        self._count += 1
        name = f"r{self._count}"
        self.engine.add_request(EngineCoreRequest(name, list(prompt), params, arrival_time=time.monotonic()))
        self.wait_for(lambda: name in self.seen.finished)
        return self.seen.tokens[name]

    def wait_for(self, is_so: Callable[[], bool]) -> None:
        """Wait until ``is_so()``.

        Raises:
            RuntimeError: The engine told of an error, or it takes too long.
        """
        with self._news:
            is_over = self._news.wait_for(lambda: self.seen.errors or is_so(), _WAIT_S)
        if self.seen.errors:
            raise RuntimeError(self.seen.errors[0])
        if not is_over:
            raise RuntimeError(f"nothing for {_WAIT_S:.0f} s")

    def finish(self, names: Sequence[str]) -> None:
        """End requests and wait until they have ended."""
        self.engine.abort_requests(names)
        self.wait_for(lambda: self.seen.finished.issuperset(names))


@contextmanager
def serving(checkpoint: Checkpoint, plan: Plan, way: Way, machine: Machine) -> Iterator[Driver]:
    """Run an engine for the block; its memory is the card's again afterwards."""
    blocks = plan.max_batch * -(-(plan.prompt + plan.steps + 128) // 16) + plan.max_model_len // 16
    config = EngineConfig(
        ModelConfig(Path(plan.model), max_model_len=plan.max_model_len),
        CacheConfig(block_size=16, num_blocks=blocks),
        SchedulerConfig(
            max_num_batched_tokens=max(_LONG_PROMPT, plan.max_batch),
            max_num_seqs=plan.max_batch,
            async_scheduling=way.overlap,
        ),
        DeviceConfig("cuda", enforce_eager=not way.graphs),
    )
    driver = Driver(checkpoint.arch)
    driver.engine = Engine(config, checkpoint, publish=driver.publish, on_state=driver.on_state, machine=machine)
    driver.engine.start()
    try:
        driver.wait_until_ready()
        yield driver
    finally:
        driver.engine.shutdown(_WAIT_S)
        del driver.engine
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


# ---------------------------------------------------------------------- what is measured
def _measure_decode(
    bench: Bench, plan: Plan, way: Way, driver: Driver, batch: int, replays: Replays, host: HostTimes
) -> None:
    """Time steps in which all requests decode, from one step's outputs to the next one's."""
    names = driver.send(batch, prompt=plan.prompt, max_tokens=plan.max_model_len - plan.prompt - 1)
    driver.wait_for(lambda: _count_full(driver, batch) >= 3)  # the last prompts are through
    replays.marks, host.parts, replays.is_on, host.is_on = [], {}, True, True
    first = len(driver.seen.steps)
    driver.wait_for(lambda: len(driver.seen.steps) >= first + plan.steps)
    replays.is_on = host.is_on = False
    last = len(driver.seen.steps)
    driver.finish(names)
    times = [at for at, _ in driver.seen.steps[first:last]]
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    context = plan.prompt + first + (last - first) / 2
    floor = decode_floor(
        driver.arch, batch=batch, context=context, bandwidth=bench.bandwidth, gemm_rate=bench.gemm_rate
    )
    label = f"{plan.model} decode step, batch {batch}, {way.name}"
    bench.sink.add(
        label,
        "ms",
        [gap * 1e3 for gap in gaps],
        floor=floor.seconds * 1e3,
        formula=floor.formula,
        goal=plan.goals.get(batch) if way == BEST else None,
    )
    _tell_device(bench, f"{plan.model} batch {batch}, {way.name}", way, replays, len(host.parts.get("launch", [])))
    _tell_host(bench, f"{plan.model} batch {batch}, {way.name}", driver.seen, first, host)


def _answer(driver: Driver) -> list[int]:
    """Ask the same of every engine, nobody else there: a greedy answer, and one drawn by a seed."""
    prompt = [1 + 7 * index % (driver.arch.vocab_size - 1) for index in range(40)]
    ways = (SamplingParams(_ANSWER_TOKENS, temperature=0.0, ignore_eos=True),)
    ways += (SamplingParams(_ANSWER_TOKENS, temperature=0.8, top_p=0.9, seed=7, ignore_eos=True),)
    return [token for params in ways for token in driver.ask(prompt, params)]


def _compare_answers(bench: Bench, plan: Plan, answers: dict[Way, list[int]]) -> None:
    """Overlap changes no kernel and no batch here, hence no token. Graphs may: attention is cut up otherwise."""
    for way, answer in answers.items():
        other = next((each for each in answers if each.graphs == way.graphs and each.overlap != way.overlap), None)
        if way.overlap and other is not None and answers[other] != answer:
            bench.sink.note(f"{plan.model}, {way.name}", "other tokens than without overlap", is_failure=True)
        same = sum(a == b for a, b in zip(answer, answers[BEST], strict=True))
        bench.sink.add(f"{plan.model}, {way.name}: tokens as the best way's", f"of {len(answer)}", [same])


def _count_full(driver: Driver, batch: int) -> int:
    return sum(num_tokens == batch for _, num_tokens in driver.seen.steps)


def _tell_device(bench: Bench, label: str, way: Way, replays: Replays, num_steps: int) -> None:
    """How long a step's graphs themselves took, and how much of the time none ran."""
    if not way.graphs:
        return
    bench.accelerator.synchronize()
    if len(replays.marks) < 3:
        bench.sink.note(label, "hardly a step was replayed from a graph", is_failure=True)
        return
    bench.sink.add(f"{label}: graphs alone", "ms", [s * 1e3 for s in replays.busy_s(num_steps)])
    goal = Goal(at_most=_MAX_IDLE_PERCENT) if way == BEST else None
    bench.sink.add(f"{label}: device idle", "%", [100 * replays.idle_share()], goal=goal)


def _tell_host(bench: Bench, label: str, seen: Seen, first: int, host: HostTimes) -> None:
    parts = {"schedule": seen.schedule_s[first:], "update": seen.update_s[first:], **host.parts}
    for part, seconds in parts.items():
        if seconds:
            bench.sink.add(f"{label}: host, {part}", "us", [s * 1e6 for s in seconds])


def _measure_prompt(bench: Bench, plan: Plan, driver: Driver) -> None:
    """Time one long prompt that nobody else disturbs, from its arrival to its first token."""
    times = []
    for _ in range(bench.pick(4, 2)):
        started = time.perf_counter()
        names = driver.send(1, prompt=plan.long_prompt, max_tokens=1)
        driver.wait_for(lambda: driver.seen.finished.issuperset(names))  # noqa: B023
        times.append(driver.seen.steps[-1][0] - started)
    floor = prefill_floor(driver.arch, tokens=plan.long_prompt, gemm_rate=bench.gemm_rate)
    bench.sink.add(
        f"{plan.model} prompt of {plan.long_prompt} tokens",
        "ms",
        [s * 1e3 for s in times[1:]],
        floor=floor.seconds * 1e3,
        formula=floor.formula,
    )
