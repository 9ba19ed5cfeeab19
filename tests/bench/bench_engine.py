"""The real model under an engine of the bench's choosing: loaded once, then many engines, every token's time kept.

Puts together what Engine puts together, because a bench may add constraints of its own; changes none of the parts.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from engine_core import (
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    EngineCoreOutputs,
    EngineCoreRequest,
    ModelConfig,
    SamplingParams,
    SchedulerConfig,
    SchedulerStats,
)
from engine_core.core import EngineCore
from engine_core.engine import open_checkpoint, warm_up
from engine_core.housekeeping import no_full_collections
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.model.compute import settle_compute
from engine_core.model.decoder import LanguageModel
from engine_core.model.runner import ModelRunner
from engine_core.scheduler.constraint import Constraint
from engine_core.scheduler.constraints import build_constraints
from engine_core.scheduler.output import SchedulerOutput
from engine_core.scheduler.scheduler import Scheduler
from engine_core.step_executor import DirectExecutor, PendingResult


@dataclass(frozen=True, slots=True)
class Job:
    """A request and when it comes.

    Attributes:
        group: What the bench calls its kind.
        at_s: Seconds after the start.
        prompt: Token ids.
        max_tokens: Output tokens, exactly: nothing ends it earlier.
        priority: See EngineCoreRequest.
    """

    group: str
    at_s: float
    prompt: list[int]
    max_tokens: int
    priority: int = 0


@dataclass(slots=True)
class JobTimes:
    """What became of a job. Seconds after the start.

    Attributes:
        job: Which.
        admitted_s: Start of the first step that computed any of it.
        num_preemptions: Times its blocks were taken away.
        tokens_s: When each output token was published.
    """

    job: Job
    admitted_s: float = 0.0
    num_preemptions: int = 0
    tokens_s: list[float] = field(default_factory=list)

    @property
    def queue_s(self) -> float:
        """Wait until the first step."""
        return self.admitted_s - self.job.at_s

    @property
    def first_token_s(self) -> float:
        """Wait until the first token."""
        return self.tokens_s[0] - self.job.at_s

    @property
    def end_s(self) -> float:
        """Wait until the last token."""
        return self.tokens_s[-1] - self.job.at_s


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the model: when (seconds after the start) and how many requests had part in it."""

    started_s: float
    ended_s: float
    num_rows: int

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return self.ended_s - self.started_s


@dataclass(slots=True)
class Run:
    """All that was seen of one engine.

    Attributes:
        times: A line a job, in the jobs' order.
        steps: Every step of the model.
        stats: What the scheduler said after each of them.
    """

    times: list[JobTimes]
    steps: list[Step] = field(default_factory=list)
    stats: list[SchedulerStats] = field(default_factory=list)

    def of(self, group: str) -> list[JobTimes]:
        """Return the lines of one kind."""
        return [line for line in self.times if line.job.group == group]

    @property
    def total_s(self) -> float:
        """From the start to the last token."""
        return max(line.tokens_s[-1] for line in self.times)

    def get_mean_rows(self, since_s: float = 0.0) -> float:
        """Return the requests in a step, weighted with the steps' durations.

        Args:
            since_s: Steps that started earlier do not count.
        """
        steps = [step for step in self.steps if step.started_s >= since_s]
        return sum(step.duration_s * step.num_rows for step in steps) / sum(step.duration_s for step in steps)

    def count(self, name: str) -> int:
        """Return the sum of one of SchedulerStats' counters."""
        return sum(getattr(stats, name) for stats in self.stats)


class LoadedModel:
    """A model in bf16 on whatever the product would compute it with here.

    Args:
        path: A checkpoint.
    """

    def __init__(self, path: Path) -> None:
        checkpoint = open_checkpoint(path)
        self.path = path
        self.trained_model_len: int = checkpoint.arch.max_position_embeddings
        self.vocab_size: int = checkpoint.arch.vocab_size
        asked = EngineConfig(ModelConfig(path, quantization="none"))
        compute = settle_compute(asked.resolve(trained_model_len=self.trained_model_len), checkpoint.arch)
        self.has_shared_level: bool = compute.config.scheduler.enable_cascade_attn
        self.decoder: LanguageModel = compute.load(checkpoint, lambda share, detail: None)


class BenchEngine:
    """One engine, for one run.

    Args:
        model: What computes.
        cache: Its ``num_blocks`` must be given.
        scheduler: As in the product.
        max_model_len: Context in tokens.
        extra: Constraints beside those that ``scheduler`` turns on.
    """

    def __init__(
        self,
        model: LoadedModel,
        *,
        cache: CacheConfig,
        scheduler: SchedulerConfig,
        max_model_len: int = 2048,
        extra: Sequence[Constraint] = (),
    ) -> None:
        scheduler = replace(scheduler, enable_cascade_attn=model.has_shared_level)
        asked = EngineConfig(ModelConfig(model.path, "auto", max_model_len), cache, scheduler, DeviceConfig("cpu"))
        config = asked.resolve(trained_model_len=model.trained_model_len)
        assert cache.num_blocks is not None and not config.scheduler.async_scheduling
        kv = model.decoder.alloc_kv(num_pages=cache.num_blocks + 1, page_size=cache.block_size)
        warm_up(model.decoder, kv)
        self._log = _Log()
        runner = ModelRunner(decoder=model.decoder, kv=kv, max_model_len=max_model_len)
        self._core = EngineCore(
            scheduler=_build_scheduler(config, cache.num_blocks, max_model_len, extra),
            executor=_LoggingExecutor(DirectExecutor(runner), self._log),
            publish=self._log.publish,
        )

    def run(self, jobs: Sequence[Job], *, background: str = "") -> Run:
        """Send each job at its time, and wait for the ends.

        Args:
            jobs: In order of ``at_s``.
            background: A group that is not waited for: it is ended when the others have come to their ends.
        """
        log = self._log
        log.waited_for = {str(i) for i, job in enumerate(jobs) if job.group != background}
        ended = tuple(str(i) for i, job in enumerate(jobs) if job.group == background)
        client = threading.Thread(target=self._send, args=(jobs, ended), daemon=True)
        # The engine runs on the thread that loaded the model: the compute threads are that one's.
        with no_full_collections():
            client.start()
            self._core.run_busy_loop()
        client.join()
        return log.build_run(jobs)

    def _send(self, jobs: Sequence[Job], ended: tuple[str, ...]) -> None:
        started = self._log.started = time.monotonic()
        for i, job in enumerate(jobs):
            time.sleep(max(0.0, started + job.at_s - time.monotonic()))
            self._core.add_request(_build_request(str(i), job))
        self._log.is_over.wait()
        self._core.abort_requests(ended)
        self._core.stop()


def _build_scheduler(
    config: EngineConfig, num_blocks: int, max_model_len: int, extra: Sequence[Constraint]
) -> Scheduler:
    kv_cache = KVCacheManager(
        num_blocks=num_blocks,
        block_size=config.cache.block_size,
        enable_prefix_caching=config.cache.enable_prefix_caching,
        watermark=config.cache.watermark,
    )
    return Scheduler(
        config=config.scheduler,
        kv_cache=kv_cache,
        max_model_len=max_model_len,
        constraints=[*build_constraints(config.scheduler, block_size=config.cache.block_size), *extra],
    )


def _build_request(request_id: str, job: Job) -> EngineCoreRequest:
    params = SamplingParams(max_tokens=job.max_tokens, temperature=0.0, ignore_eos=True)
    return EngineCoreRequest(request_id, job.prompt, params, arrival_time=time.monotonic(), priority=job.priority)


class _Log:
    """Written while the engine runs, read when it has ended."""

    def __init__(self) -> None:
        self.started = 0.0
        self.waited_for: set[str] = set()
        self.is_over = threading.Event()
        self.steps: list[tuple[float, float, SchedulerOutput]] = []
        self._published: list[tuple[float, EngineCoreOutputs]] = []

    def publish(self, outputs: EngineCoreOutputs) -> None:
        self._published.append((time.monotonic(), outputs))
        for output in outputs.outputs:
            if output.error:
                raise RuntimeError(output.error)
            if output.finish_reason:
                self.waited_for.discard(output.request_id)
        if not self.waited_for:
            self.is_over.set()

    def build_run(self, jobs: Sequence[Job]) -> Run:
        run = Run([JobTimes(job) for job in jobs])
        for started, ended, output in self.steps:
            run.steps.append(Step(started - self.started, ended - self.started, len(output.req_ids)))
            for new in output.scheduled_new_reqs:
                if not new.resumed:
                    run.times[int(new.request_id)].admitted_s = started - self.started
            for request_id in output.preempted_req_ids:
                run.times[int(request_id)].num_preemptions += 1
        for at, outputs in self._published:
            if outputs.stats is not None:
                run.stats.append(outputs.stats)
            for record in outputs.as_records():
                run.times[int(record.request_id)].tokens_s += [at - self.started] * len(record.new_token_ids)
        return run


class _LoggingExecutor:
    """Runs each step where it is submitted, and notes when."""

    def __init__(self, inner: DirectExecutor, log: _Log) -> None:
        self._inner = inner
        self._log = log

    def submit(self, output: SchedulerOutput) -> PendingResult:
        started = time.monotonic()
        result = self._inner.submit(output)
        if output.req_ids:
            self._log.steps.append((started, time.monotonic(), output))
        return result


def build_prompt_source(model: LoadedModel, seed: int) -> Callable[[int], list[int]]:
    """Return a function from a length to as many random token ids: the same ids in each run, no two prompts alike."""
    rng = random.Random(seed)
    return lambda length: [rng.randrange(model.vocab_size) for _ in range(length)]


def warm_shapes(model: LoadedModel) -> None:
    """Compute once what the experiments will compute, so that the first of them does not pay for all."""
    draw = build_prompt_source(model, seed=0)
    config = SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=16)
    decodes = [Job("warm", 0.0, draw(24), max_tokens=2 + i) for i in range(16)]
    prompts = [Job("warm", 0.0, draw(length), max_tokens=1) for length in (128, 512, 1900)]
    for jobs in (decodes, prompts):
        BenchEngine(model, cache=CacheConfig(num_blocks=64), scheduler=config).run(jobs)
