"""The server under tests/bench/http_path.py, in a process of its own: everything real but the model.

The scheduler, the loop around it, detokenising and HTTP are those of `pointsman serve`; a step answers at once, or
after a time that is slept away, so that all the CPU time of the process is the path's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, ParamSpec, TypeVar

from engine_core import EngineCommand, EngineCoreRequest, EnginePhase, EngineState
from engine_core.config import SchedulerConfig
from engine_core.core import EngineCore
from engine_core.housekeeping import no_full_collections
from engine_core.kv_cache.manager import KVCacheManager
from engine_core.scheduler.constraints import build_constraints
from engine_core.scheduler.output import ModelRunnerOutput, SchedulerOutput
from engine_core.scheduler.scheduler import Scheduler
from engine_core.step_executor import DirectExecutor
from server.admission import Admission, SamplingDefaults
from server.app import AppSettings, create_app
from server.config import ServerConfig, default_cache_dir
from server.engine_api import OnState, Publish
from server.http.listener import bind, create_http_server, listen
from server.in_proc_client import InProcEngineClient
from server.metrics import ServerMetrics
from server.model_resolver import resolve_model
from server.output_processor import OutputProcessor
from server.prompt_threads import PromptThreads
from server.prompts import PromptBuilder
from server.serving import LoadedModel, open_model
from server.tokenizer import Tokenizer

MODEL = "m"
_BLOCK_SIZE, _NUM_BLOCKS, _MAX_MODEL_LEN = 64, 8192, 4096
_SWITCH_INTERVAL_S = 0.0005  # as `pointsman serve` sets it

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(slots=True)
class Clocks:
    """CPU seconds, by stage of the path."""

    by_stage: dict[str, float] = field(default_factory=dict)

    def time(self, stage: str, call: Callable[P, T]) -> Callable[P, T]:
        """Return ``call``, its thread's CPU time counted to a stage."""
        self.by_stage[stage] = 0.0

        def timed(*args: P.args, **kwargs: P.kwargs) -> T:
            started = time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                self.by_stage[stage] += time.thread_time() - started

        return timed


class _PlainRunner:
    """Samples words, one a row, that have nothing to do with the prompt."""

    def __init__(self, token_ids: Sequence[int], step_s: float) -> None:
        self._token_ids = token_ids
        self._step_s = step_s
        self._num_left: dict[str, int] = {}
        self._num_sampled = 0
        self.num_steps = 0

    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in output.finished_req_ids:
            self._num_left.pop(request_id, None)
        for new in output.scheduled_new_reqs:
            self._num_left[new.request_id] = len(new.token_ids) - new.num_computed_tokens
        sampled = [self._sample(id_, count) for id_, count in zip(output.req_ids, output.token_counts, strict=True)]
        self.num_steps += 1
        if self._step_s:
            time.sleep(self._step_s)
        return ModelRunnerOutput(sampled)

    def _sample(self, request_id: str, count: int) -> int:
        left = self._num_left[request_id] = self._num_left[request_id] - count
        if left > 0:
            return -1
        self._num_sampled += 1
        return self._token_ids[self._num_sampled % len(self._token_ids)]


class _PlainEngine:
    """What the engine client asks of an engine."""

    def __init__(self, runner: _PlainRunner, max_num_seqs: int, clocks: Clocks, publish: Publish, _: OnState) -> None:
        config = SchedulerConfig(max_num_batched_tokens=2048, max_num_seqs=max_num_seqs)
        scheduler = Scheduler(
            config=config,
            kv_cache=KVCacheManager(num_blocks=_NUM_BLOCKS, block_size=_BLOCK_SIZE, watermark=0.01),
            max_model_len=_MAX_MODEL_LEN,
            constraints=build_constraints(config, block_size=_BLOCK_SIZE),
        )
        for stage, name in (("schedule", "schedule"), ("update", "update_from_output"), ("stats", "make_stats")):
            setattr(scheduler, name, clocks.time(stage, getattr(scheduler, name)))
        runner.execute = clocks.time("fake model", runner.execute)  # type: ignore[method-assign]
        self._core = EngineCore(
            scheduler=scheduler, executor=DirectExecutor(runner), publish=clocks.time("wake-up", publish)
        )
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.state = EngineState(
            EnginePhase.READY, num_blocks=_NUM_BLOCKS, block_size=_BLOCK_SIZE, max_model_len=_MAX_MODEL_LEN
        )

    def _run(self) -> None:
        with no_full_collections():
            self._core.run_busy_loop()

    def start(self) -> None:
        self.thread.start()

    def add_request(self, request: EngineCoreRequest) -> None:
        self._core.add_request(request)

    def abort_requests(self, request_ids: Sequence[str]) -> None:
        self._core.abort_requests(tuple(request_ids))

    def ask(self, command: EngineCommand) -> Future[bool]:
        answer: Future[bool] = Future()
        self._core.ask(command, answer)
        return answer

    def seconds_since_progress(self) -> float:
        return self._core.seconds_since_progress()

    def shutdown(self, timeout_s: float) -> bool:
        self._core.stop()
        self.thread.join(timeout_s)
        return not self.thread.is_alive()


def run(pipe: Connection, *, model: str | None, max_num_seqs: int, step_s: float, profile: str | None) -> None:
    """Serve on a free port until told to stop.

    Args:
        pipe: Gets the port, then the figures so far for each message; an empty message ends it.
        model: Whose tokenizer; None = the embedded model's.
        max_num_seqs: Requests that run at once.
        step_s: How long a step sleeps.
        profile: Write cProfile's figures of the event loop to this file.
    """
    logging.basicConfig(level=logging.WARNING)
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    resolved = resolve_model(model, progress=lambda line: None, cache_dir=default_cache_dir())
    loaded = open_model(ServerConfig(), resolved)
    server = _BenchServer(loaded, pipe, max_num_seqs, step_s)
    if profile is None:
        server.run()
        return
    import cProfile

    profiler = cProfile.Profile(time.thread_time)
    profiler.runcall(server.run)
    profiler.dump_stats(profile)


class _BenchServer:
    def __init__(self, loaded: LoadedModel, pipe: Connection, max_num_seqs: int, step_s: float) -> None:
        self._pipe = pipe
        self._clocks = Clocks()
        self._runner = _PlainRunner(_find_words(loaded.tokenizer), step_s)
        metrics = ServerMetrics(MODEL, max_model_len=_MAX_MODEL_LEN)
        processor = OutputProcessor(
            new_decode_stream=loaded.tokenizer.decode_stream,
            token_bytes=loaded.tokenizer.token_bytes,
            metrics=metrics,
        )
        processor.process = self._clocks.time("text", processor.process)  # type: ignore[method-assign]
        engines: list[_PlainEngine] = []

        def create_engine(publish: Publish, on_state: OnState) -> _PlainEngine:
            engines.append(_PlainEngine(self._runner, max_num_seqs, self._clocks, publish, on_state))
            return engines[0]

        self._client = InProcEngineClient(create_engine, processor)
        (self._engine,) = engines
        app = create_app(
            engine_client=self._client,
            admission=Admission(
                engine_client=self._client,
                prompts=PromptBuilder(
                    tokenizer=loaded.tokenizer,
                    chat_template=loaded.chat_template,
                    vocab_size=loaded.checkpoint.arch.vocab_size,
                ),
                threads=PromptThreads(),
                served_model_name=MODEL,
                sampling_defaults=SamplingDefaults(eos_token_ids=frozenset({2})),
            ),
            metrics=metrics,
            settings=AppSettings(served_model_name=MODEL, version="0", system_fingerprint="fp"),
        )
        self._http = create_http_server(app, grace_s=1, on_refusal=lambda status: None)

    def run(self) -> None:
        with asyncio.Runner(loop_factory=self._http.config.get_loop_factory()) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        self._client.start()
        sock = bind("127.0.0.1", 0)
        listen(sock)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pipe.fileno(), self._answer)
        self._pipe.send(sock.getsockname()[1])
        await self._http.serve(sockets=[sock])
        loop.remove_reader(self._pipe.fileno())
        await asyncio.to_thread(self._client.shutdown, 5.0)

    def _answer(self) -> None:
        if not self._pipe.recv():
            self._http.should_exit = True
            return
        self._pipe.send(self._measure())

    def _measure(self) -> dict[str, Any]:
        """Return CPU seconds by stage, and the steps so far."""
        cpu = os.times()
        stages = dict(self._clocks.by_stage)
        engine_ident = self._engine.thread.ident
        assert engine_ident is not None, "it was started before anybody could ask"
        engine_s = time.clock_gettime(time.pthread_getcpuclockid(engine_ident))
        named = ("schedule", "update", "stats", "fake model", "wake-up")
        stages["engine loop"] = engine_s - sum(map(stages.__getitem__, named))
        stages["HTTP and event loop"] = time.thread_time() - stages["text"]
        stages["total"] = cpu.user + cpu.system
        stages["of it in the kernel"] = cpu.system
        stages["other threads"] = time.process_time() - time.thread_time() - engine_s
        return {"stages": stages, "num_steps": self._runner.num_steps}


def _find_words(tokenizer: Tokenizer) -> list[int]:
    """Return ids that are whole words, as most of a real text's are."""
    texts = ((token_id, tokenizer.decode([token_id])) for token_id in range(1000, 6000))
    return [token_id for token_id, text in texts if text.strip().isalpha()][:2000]
